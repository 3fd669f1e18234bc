"""Double-batch overlap: one micro-batch computes while another one's tokens are at the experts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch_eaas.batch_splitting import count_rows, join_batches, split_batch
from torch_eaas.client import Client
from torch_eaas.config import check_at_least, check_positive
from torch_eaas.errors import ConfigError
from torch_eaas.thread_state import ThreadState
from torch_eaas.turns import LOOK_UP_S, Place, Turns

T = TypeVar("T")
R = TypeVar("R")

MAX_MICRO_BATCHES = 5
"""More have nothing left to hide, and each one's work is smaller and less efficient."""


class DoubleBatchOverlap:
    """Runs model code on the parts of a batch so that one part's experts hide another's attention.

    The code needs no change: a forward, a decode step or a whole ``model.generate`` runs once for
    each micro-batch, each in a thread of its own, and at most one of them computes at a time. The
    turn passes exactly where a micro-batch waits for its experts. Interleaved runs share whatever
    the model object itself keeps, and torch's random generator; each makes its own KV cache.

    If one fails, or Ctrl-C comes, the others end where they next ask for experts, and that error
    is raised with its own traceback. One run at a time for each client. With more than one thread
    for torch's products each micro-batch has an OpenMP team of its own, whose idle threads take
    cores unless ``OMP_WAIT_POLICY=PASSIVE`` is set.

    Args:
        client: Whom the model asks for experts. The caller owns and closes it.
        num_micro_batches: Into how many parts a call splits its batch, 1 to 5; at most the
            client's ``max_micro_batches``. A batch with fewer rows has one row a part.
        min_rows: Batches with fewer rows run plain, in one part.
        timeout: The longest that a micro-batch may compute without asking for experts while
            others wait for their turn.

    Example::

        overlap = DoubleBatchOverlap(client, num_micro_batches=2)
        with torch.no_grad():
            logits = overlap(model, input_ids).logits
    """

    def __init__(
        self,
        client: Client,
        *,
        num_micro_batches: int = 2,
        min_rows: int = 2,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        check_at_least("num_micro_batches", num_micro_batches, 1)
        check_at_least("min_rows", min_rows, 1)
        check_positive("timeout", timeout)
        _check_most(client, num_micro_batches)
        self.client = client
        self.num_micro_batches = num_micro_batches
        self.min_rows = min_rows
        self.timeout = timeout

    def __call__(self, work: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Return ``work(*args, **kwargs)``, computed in micro-batches.

        Args:
            work: A model, ``model.generate``, any callable that treats rows alike.
            args: Tensors with the batch's rows and KV caches are split, all else is handed on as
                it is; see ``split_batch``. What must not be split goes into a functools.partial.
            kwargs: Likewise.

        Returns:
            The parts' results, joined in order; see ``join_batches``. That copies, caches too: a
            loop of decode steps keeps its parts and calls ``map``.

        Raises:
            ConfigError: Something cannot be split or joined, or this is a micro-batch already.
            TurnTimeout: A micro-batch computed for ``timeout`` while others waited.
        """
        given = (args, kwargs)
        num_rows = count_rows(given)
        count = min(self.num_micro_batches, num_rows)
        if num_rows < self.min_rows or count <= 1:
            return work(*args, **kwargs)

        def run(part: tuple[tuple[Any, ...], dict[str, Any]]) -> R:
            return work(*part[0], **part[1])

        return join_batches(self.map(run, split_batch(given, count)))

    def map(self, work: Callable[[T], R], parts: Sequence[T]) -> list[R]:
        """Return ``work`` of each part, in order; parts are whatever ``work`` takes.

        Args:
            work: What to do with one micro-batch.
            parts: The micro-batches, each with its own caches; one alone runs plain.

        Raises:
            ConfigError: There are more parts than slots, or this is a micro-batch already.
            TurnTimeout: A micro-batch computed for ``timeout`` while others waited.
        """
        if len(parts) <= 1:
            return [work(part) for part in parts]
        _check_most(self.client, len(parts))
        return _Run(self.client, work, parts, self.timeout.total_seconds()).results()


def _check_most(client: Client, count: int) -> None:
    most = min(MAX_MICRO_BATCHES, client.config.max_micro_batches)
    if count > most:
        raise ConfigError(
            f"num_micro_batches must be at most {MAX_MICRO_BATCHES} and the client's "
            f"max_micro_batches ({client.config.max_micro_batches}), got {count}"
        )


class _Run(Generic[T, R]):
    """One run of all micro-batches; number 0 in the caller's thread, so Ctrl-C finds it there."""

    def __init__(
        self, client: Client, work: Callable[[T], R], parts: Sequence[T], timeout: float
    ) -> None:
        self._client = client
        self._work = work
        self._parts = parts
        self._timeout = timeout
        self._turns = Turns(len(parts), timeout)
        self._results: dict[int, R] = {}

    def results(self) -> list[R]:
        """Run all, and return their results in order or raise what the first failure raised."""
        state = ThreadState()

        def in_thread(part: T) -> R:
            return state.run(self._work, part)

        first, *others = self._turns.places
        threads = [
            threading.Thread(
                target=self._run,
                args=(place, in_thread),
                name=f"eaas-micro-batch-{place.index}",
                daemon=True,
            )
            for place in others
        ]
        try:
            for thread in threads:
                thread.start()
            self._run(first, self._work)
            self._join(threads)
        except BaseException as error:
            if self._turns.error is not None:
                # a second Ctrl-C waits for nobody: they end where they next ask for experts
                raise
            self._turns.stop(error)
            started = [thread for thread in threads if thread.ident is not None]
            for place in others[len(started) :]:
                self._turns.end(place, None)
            self._turns.end(first, error)
            self._join(started)
        if self._turns.error is not None:
            raise self._turns.error
        return [self._results[index] for index in range(len(self._parts))]

    def _run(self, place: Place, work: Callable[[T], R]) -> None:
        error: BaseException | None = None
        try:
            place.begin()
            with self._client.taking_turns(place):
                self._results[place.index] = work(self._parts[place.index])
        except BaseException as raised:
            error = raised
        finally:
            place.end(error)

    def _join(self, threads: list[threading.Thread]) -> None:
        """Wait until all have ended, or until nobody has asked for experts for too long."""
        for thread in threads:
            while thread.is_alive():
                thread.join(min(LOOK_UP_S, self._timeout))
                if thread.is_alive() and self._turns.idle_s > self._timeout:
                    self._turns.stop(self._turns.too_long("the caller"))
                    return
