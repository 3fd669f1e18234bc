"""Text to token ids and back, a token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, Protocol

from typing_extensions import override

from torch_eaas.errors import ConfigError
from torch_eaas.models.checkpoint import Checkpoint

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""A checkpoint with one of these has a tokenizer."""

BYTES = 256
"""The vocabulary of a model whose token ids are bytes."""

_HALF = "\N{REPLACEMENT CHARACTER}"


class Text(Protocol):
    """What a model reads and writes."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...

    def decoder(self) -> Callable[[int | None], str]:
        """Return a function that takes an id and returns the text that is complete with it.

        None stands for the end: what is left comes out.
        """
        ...


class ByteText(Text):
    """Token ids are bytes of UTF-8."""

    @override
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    @override
    def decoder(self) -> Callable[[int | None], str]:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def decode(token: int | None) -> str:
            return utf8.decode(b"", final=True) if token is None else utf8.decode(bytes([token]))

        return decode


class TokenizerText(Text):
    """Token ids are those of a tokenizer of transformers.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @override
    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    @override
    def decoder(self) -> Callable[[int | None], str]:
        ids: list[int] = []
        shown = ""

        def decode(token: int | None) -> str:
            nonlocal shown
            if token is not None:
                ids.append(token)
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            if token is not None and text.endswith(_HALF):
                # the rest of a character may come with the next token
                return ""
            new, shown = text[len(shown) :], text
            if text.endswith("\n"):
                # what follows does not change what is before, so that decoding stays quick
                ids.clear()
                shown = ""
            return str(new)

        return decode


def text_of(checkpoint: Checkpoint) -> Text:
    """Return how a checkpoint's model reads and writes.

    Raises:
        ConfigError: It has no tokenizer, and its token ids are not bytes.
    """
    if any((checkpoint.path / name).exists() for name in TOKENIZER_FILES):
        import transformers

        return TokenizerText(transformers.AutoTokenizer.from_pretrained(checkpoint.path))
    if checkpoint.config.get("vocab_size") != BYTES:
        raise ConfigError(
            f"{checkpoint.path} has none of {', '.join(TOKENIZER_FILES)}, and with a vocab_size "
            f"of {checkpoint.config.get('vocab_size')!r} its token ids are not bytes"
        )
    return ByteText()
