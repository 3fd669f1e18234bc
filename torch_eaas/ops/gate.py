"""Gates: how a step that has failed ends early, and whole.

A wait that gives up sets the step's *abort word*. Each micro-batch has a *gate*, a copy of the
abort word that the last block of a wait to end makes; the stages behind it, up to the next wait,
look at the gate alone. Were the blocks of a stage to look at the abort word themselves, some could
see it and some not: half a request would be written, and an arrival counter left odd. So either the
whole stage runs, or none of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def set_abort(abort: tl.tensor, word: tl.tensor) -> None:
    """Set the step's abort word unless another failure of the step has: the first one counts."""
    tl.atomic_cas(abort, tl.zeros((), tl.int64), word, sem="release", scope="gpu")


@triton.jit
def close_gate(abort: tl.tensor, gate: tl.tensor, arrivals: tl.tensor) -> None:
    """Let the last block of a launch that comes here copy the abort word into the gate.

    It also puts the counter of arrivals back to 0. All blocks have looked at the gate before.
    """
    # the count is one thread's: what the others did must come before it
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrivals, 0)
        tl.store(gate, tl.atomic_add(abort, 0, sem="acquire", scope="gpu"))
