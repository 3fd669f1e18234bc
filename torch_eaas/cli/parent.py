"""A child that dies with its parent, however that one ends: the kernel sees to it.

``python -m torch_eaas.cli.parent PID COMMAND...`` does it for any command, for launch scripts.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Be killed when the parent ends; end now if it has ended already.

    The kernel looks at the *thread* that started this process: start children from a thread that
    lives as long as they may.

    Args:
        parent: The parent's pid; 0 for whoever it is.
    """
    # not SIGTERM: a drain, or a native call that does not return, would outlive the parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if parent and os.getppid() != parent:
        sys.exit(f"the parent {parent} has ended")


def main(arguments: Sequence[str]) -> None:
    """Become a command that dies with a parent; returns only if it cannot."""
    if len(arguments) < 2 or not arguments[0].isdecimal():
        print("usage: python -m torch_eaas.cli.parent PID COMMAND...", file=sys.stderr)
        sys.exit(2)
    die_with(int(arguments[0]))
    try:
        # the kernel keeps the wish across exec
        os.execvp(arguments[1], list(arguments[1:]))
    except OSError as error:
        sys.exit(f"{arguments[1]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
