"""Loads experts that the monitor asks for, in a thread of its own, beside the serving."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from torch_eaas.placement import Holdings, pairs_of

Load = Callable[[Sequence[tuple[int, int]]], None]
"""Adds some (layer, expert) pairs to a server's experts; called in one thread, may take long."""

LOADED_TOGETHER = 16
"""Experts after which the monitor hears of what was loaded."""

CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class Loading:
    """What one server loads beside what it began with.

    A load that fails is logged, counted and told to the monitor once; it ends nothing.

    Args:
        name: The server's name, for the log.
        load: Adds experts; None if the server can add none.
        room: How many it may add.
        holdings: Tells what the server holds now.
        counters: Where loads are counted: ``experts_loaded``, ``load_failures``.
        notify: Called after each change, so that the monitor hears of it at once.
    """

    def __init__(
        self,
        *,
        name: str,
        load: Load | None,
        room: int,
        holdings: Callable[[], Holdings],
        counters: Counter[str],
        notify: Callable[[], None],
    ) -> None:
        self._name = name
        self._load = load
        self._holdings = holdings
        self._counters = counters
        self._notify = notify
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.room = room if load is not None else 0
        """How many more experts may be added."""
        self.trouble = ""
        """Why the last load failed; empty once the monitor was told."""

    def ask(self, wanted: Holdings) -> None:
        """Load what of this is not held yet; does nothing while a load is under way."""
        if self._load is None or not wanted:
            return
        with self._lock:
            if self._thread is not None or self._stopping.is_set():
                return
            held = set(pairs_of(self._holdings()))
            missing = [pair for pair in pairs_of(wanted) if pair not in held][: self.room]
            if missing:
                self._thread = threading.Thread(
                    target=self._run, args=(self._load, missing), name="eaas-loading", daemon=True
                )
                self._thread.start()

    def told(self, trouble: str) -> None:
        """Note that the monitor has heard of a trouble."""
        if self.trouble is trouble:
            self.trouble = ""

    def stop(self) -> None:
        """Load no more, beyond the few experts that are under way; returns at once."""
        self._stopping.set()

    def close(self) -> None:
        """Stop, and wait a moment for what is under way."""
        self.stop()
        with self._lock:
            thread = self._thread
        if thread is not None:
            # a thread that is inside torch when the interpreter ends would end the process hard
            thread.join(CLOSE_S)

    def _run(self, load: Load, missing: Sequence[tuple[int, int]]) -> None:
        logger.info("server %s loads experts: %d", self._name, len(missing))
        try:
            for at in range(0, len(missing), LOADED_TOGETHER):
                if self._stopping.is_set():
                    break
                some = missing[at : at + LOADED_TOGETHER]
                load(some)
                self.room -= len(some)
                self._counters["experts_loaded"] += len(some)
                self._notify()
        except Exception as error:
            logger.exception("server %s could not load experts", self._name)
            self._counters["load_failures"] += 1
            self.trouble = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._thread = None
            self._notify()
