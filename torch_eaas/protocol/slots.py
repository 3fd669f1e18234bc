"""Both ends' books on the slots of one window: which may be written, which are to be served."""

from __future__ import annotations

from collections.abc import Sequence

from torch_eaas.protocol.words import REQUEST, RESPONSE, is_free, is_mine, is_newer, next_word


class ClientSlots:
    """The client's book: a slot is free, in use, or given up until its late answer comes.

    Example:
        ``take()`` gives slot 0, ``post(0)`` its word ``0x101``; the answer's word ``0x102`` is
        ``answered(0, 0x102)``, and ``release(0)`` frees it for the next request.
    """

    def __init__(self, num_slots: int) -> None:
        self._request_words = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._given_up: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that may be taken now."""
        return len(self._free)

    @property
    def num_given_up(self) -> int:
        """Slots that wait for a late answer."""
        return len(self._given_up)

    @property
    def num_in_use(self) -> int:
        """Slots whose answer somebody waits for or reads."""
        return len(self._request_words) - len(self._free) - len(self._given_up)

    def take(self) -> int | None:
        """Return a free slot, or None; it is the caller's until ``release`` or ``give_up``."""
        return self._free.pop() if self._free else None

    def post(self, slot: int) -> int:
        """Return the word that announces the slot's next request; it is stored last of all."""
        word = next_word(self._request_words[slot], REQUEST)
        self._request_words[slot] = word
        return word

    def answered(self, slot: int, response_word: int) -> bool:
        """Return whether ``response_word`` answers the slot's request."""
        return is_mine(response_word, self._request_words[slot])

    def release(self, slot: int) -> None:
        """Free a slot whose answer has been read."""
        self._free.append(slot)

    def give_up(self, slot: int) -> None:
        """Read the slot's answer no more; the slot stays busy until that answer has come."""
        self._given_up.add(slot)

    def reclaim(self, response_words: Sequence[int]) -> int:
        """Free the given-up slots whose late answer has come; return how many."""
        late = [s for s in self._given_up if is_free(self._request_words[s], response_words[s])]
        for slot in late:
            self._given_up.remove(slot)
            self._free.append(slot)
        return len(late)


class ServerSlots:
    """The server's book: the last word seen in each slot, and when the slot was last looked at."""

    def __init__(self, num_slots: int, now: float) -> None:
        self._seen = [0] * num_slots
        self._scanned_at = now
        self._ready: list[tuple[int, int, float]] = []

    @property
    def num_ready(self) -> int:
        """Requests seen and not yet taken."""
        return len(self._ready)

    def scan(self, words: Sequence[int], now: float) -> None:
        """Look at the words; a newer one makes its slot ready.

        A request's budget counts from the scan before the one that saw its word: a server that
        was suspended in between must not believe that the request is fresh.
        """
        if words != self._seen:
            for slot, word in enumerate(words):
                if is_newer(word, self._seen[slot]):
                    self._seen[slot] = word
                    # a client that overwrites its own request must not make this list grow
                    self._ready = [ready for ready in self._ready if ready[0] != slot]
                    self._ready.append((slot, word, self._scanned_at))
        self._scanned_at = now

    def peek(self) -> tuple[int, int, float]:
        """Return what ``take`` would."""
        return self._ready[0]

    def take(self) -> tuple[int, int, float]:
        """Return the oldest ready request: slot, word, and when its budget began to count."""
        return self._ready.pop(0)

    @staticmethod
    def reply_word(request_word: int) -> int:
        """Return the word that answers ``request_word``."""
        return (request_word & ~0xFF) | RESPONSE
