"""Wakes the listeners of one event loop, and tells them when to go home."""

from __future__ import annotations

import asyncio


class Bell:
    """Rings when there is news. All calls come from one event loop."""

    def __init__(self) -> None:
        self.stopped = False
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake all who wait."""
        self._event.set()
        self._event = asyncio.Event()

    def stop(self) -> None:
        """Wake all who wait, for the last time."""
        self.stopped = True
        self.ring()

    async def wait(self, seconds: float) -> bool:
        """Wait for the next ring; return False if none came in time."""
        if self.stopped:
            return True
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return False
        return True
