"""A word of shared memory in which the kernel says that a process is dying, before all else.

The socket of a killed process closes only after its memory is torn down: 0.2 s for 1 GiB. A robust
mutex is let go of first: the kernel then sets a bit in its word (``FUTEX_OWNER_DIED``), which
everybody who maps the word can read. Nobody but its owner locks it.
"""

from __future__ import annotations

import ctypes
import os

from torch_eaas.comm.window import Window, adopt_window, create_window
from torch_eaas.errors import TransportError

LIFELINE_BYTES = 128

_OWNER_DIED = 0x4000_0000
_ATTRIBUTE_BYTES = 64
_ROBUST = _SHARED = 1


class Lifeline:
    """The owner's end: held by one thread from its first to its last moment."""

    def __init__(self) -> None:
        self._window = create_window(LIFELINE_BYTES, "torch-eaas-lifeline")
        self._mutex: ctypes.c_char | None = ctypes.c_char.from_buffer(self._window.view)
        self._libc = ctypes.CDLL(None)
        self._is_held = False

    def hold(self) -> None:
        """Lock the mutex in this thread, whose end it is to tell.

        Raises:
            TransportError: This system has no robust mutexes.
        """
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        assert self._mutex is not None
        mutex = ctypes.byref(self._mutex)
        try:
            failed = (
                self._libc.pthread_mutexattr_init(attributes)
                or self._libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
                or self._libc.pthread_mutexattr_setpshared(attributes, _SHARED)
                or self._libc.pthread_mutex_init(mutex, attributes)
                or self._libc.pthread_mutex_lock(mutex)
            )
        except AttributeError as error:
            raise TransportError(f"no lifeline: {error}") from error
        if failed:
            raise TransportError(f"no lifeline: {os.strerror(failed)}")
        self._is_held = True

    def let_go(self) -> None:
        """Unlock it, in the thread that holds it: this end is no death. The memory goes too."""
        if self._is_held and self._mutex is not None:
            self._libc.pthread_mutex_unlock(ctypes.byref(self._mutex))
        self._mutex = None
        self._window.close()

    def hand_out(self) -> Window:
        """Return the window once more, for a peer."""
        return adopt_window(os.dup(self._window.fd), LIFELINE_BYTES)


class LifelineReader:
    """A peer's end.

    Args:
        window: What the owner handed out; it is closed here.
    """

    def __init__(self, window: Window) -> None:
        self._word = window.view.cast("I")
        window.close()

    @property
    def is_dead(self) -> bool:
        """Whether the kernel has said that the owner is dying."""
        return bool(self._word[0] & _OWNER_DIED)
