from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_eaas.cli.text import ByteText, Text, TokenizerText, text_of
from torch_eaas.errors import ConfigError
from torch_eaas.models.checkpoint import Checkpoint


def pieces(text: Text, tokens: list[int]) -> list[str]:
    decoder = text.decoder()
    return [*map(decoder, tokens), decoder(None)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["a", "b", ""]),
        ("\u00e9!", ["", "\u00e9", "!", ""]),
        ("\U0001f44d", ["", "", "", "\U0001f44d", ""]),
        ("", [""]),
    ],
    ids=["ascii", "two bytes", "four bytes", "nothing"],
)
def test_bytes_come_out_as_whole_characters(text: str, expected: list[str]) -> None:
    assert pieces(ByteText(), ByteText().encode(text)) == expected


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert pieces(ByteText(), [0xFF, 65, 0xC3]) == ["\ufffd", "A", "", "\ufffd"]


def test_a_vocabulary_of_bytes_needs_no_tokenizer(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        assert isinstance(text_of(checkpoint), ByteText)


def test_another_vocabulary_needs_one(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 300}')
    with (
        Checkpoint(folder) as checkpoint,
        pytest.raises(ConfigError, match=r"has none of tokenizer.json, .* vocab_size of 300"),
    ):
        text_of(checkpoint)


def test_a_tokenizer_is_that_of_transformers(folder: Path) -> None:
    _write_tokenizer(folder)
    with Checkpoint(folder) as checkpoint:
        text = text_of(checkpoint)
    assert isinstance(text, TokenizerText)
    told = "to be \u00e9\nor not\n"
    ids = text.encode(told)
    assert len(ids) < len(told.encode())
    came = pieces(text, ids)
    assert "".join(came) == told
    assert came[0] == "to"
    # the first half of a character waits for the second
    assert came[ids.index(195)] == ""


def _write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE that knows one merge: ``t`` and ``o``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = dict(zip(_byte_order(alphabet), range(256), strict=True))
    vocabulary["to"] = 256
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_order(alphabet: list[str]) -> list[str]:
    """Order GPT-2's stand-ins for bytes by byte: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    order = [chr(b) if b in plain else chr(next(others)) for b in range(256)]
    assert sorted(order) == alphabet
    return order
