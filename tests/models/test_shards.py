"""A safetensors file is read by ranges, and refused with its likely cause if it is broken."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torch_eaas.errors import CheckpointError
from torch_eaas.models.shards import Shard

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 4302384\n"


def _file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


STORED = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(7).bfloat16(),
    "fp8": torch.randn(5, 3).to(torch.float8_e4m3fn),
    "int64": torch.arange(-3, 3),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float16),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize("name", STORED)
def test_tensor_comes_back_as_it_was_saved(tmp_path: Path, name: str) -> None:
    save_file(STORED, tmp_path / "x.safetensors", metadata={"format": "pt"})
    shard = Shard(tmp_path / "x.safetensors")
    found = shard.read(name)
    shard.close()
    assert found.dtype == STORED[name].dtype
    assert found.shape == STORED[name].shape
    assert found.view(-1).view(torch.uint8).equal(STORED[name].view(-1).view(torch.uint8))


def test_tensors_do_not_share_memory(tmp_path: Path) -> None:
    save_file(STORED, tmp_path / "x.safetensors")
    shard = Shard(tmp_path / "x.safetensors")
    shard.read("fp32").zero_()
    assert shard.read("fp32").equal(STORED["fp32"])
    shard.close()


def test_reads_that_come_in_pieces_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(STORED, tmp_path / "x.safetensors")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:7]], at))
    shard = Shard(tmp_path / "x.safetensors")
    assert shard.read("fp32").equal(STORED["fp32"])
    assert shard.bytes_read == 60
    shard.close()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), r"\(0 bytes\): too short for a safetensors header"),
    "git-lfs": (lambda p: p.write_bytes(LFS), "header too large.*git-lfs pointer; run `git lfs"),
    "web-page": (
        lambda p: p.write_bytes(b"<!DOCTYPE html><html>Sign in</html>"),
        "header too large.*web page, not the file; download it again",
    ),
    "zip": (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(range(60))), "zip file, .*convert it"),
    "noise": (lambda p: p.write_bytes(b"\xff" * 99), "header too large.*it begins with b'.xff"),
    "cut-in-header": (
        lambda p: p.write_bytes(_file(p, {"a": _entry()}, bytes(8)).read_bytes()[:30]),
        r"\(30 bytes\): header of \d+ bytes does not fit into the file: it was cut short",
    ),
    "cut-in-data": (
        lambda p: _file(p, {"a": _entry()}, bytes(7)),
        "file not fully covered: its tensors end at byte .*; it was cut short",
    ),
    "trailing-bytes": (
        lambda p: _file(p, {"a": _entry()}, bytes(9)),
        "file not fully covered: .*it has bytes after the last tensor",
    ),
    "no-json": (lambda p: _file(p, b"{nope}"), "header is not JSON: Expecting property name"),
    "no-utf8": (lambda p: _file(p, b'{"\xff": 1}'), "header is not JSON"),
    "nested": (lambda p: _file(p, b"[" * 99999), "header is not JSON"),
    "list": (lambda p: _file(p, [1]), "header is a list, not an object"),
    "twice": (lambda p: _file(p, b'{"a": 1, "a": 2}'), "not JSON: 'a' stands there twice"),
    "no-offsets": (
        lambda p: _file(p, {"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        "header entry of 'a' needs dtype, shape and data_offsets, got",
    ),
    "dtype": (
        lambda p: _file(p, {"a": _entry("F6_E2M3")}, bytes(8)),
        "'a' has dtype 'F6_E2M3', known are F64, F32",
    ),
    "negative-shape": (
        lambda p: _file(p, {"a": _entry(shape=[-1, -2])}, bytes(8)),
        r"'a' has shape \[-1, -2\], which is none",
    ),
    "size": (
        lambda p: _file(p, {"a": _entry(shape=[3])}, bytes(8)),
        r"'a', F32 of shape \[3\], takes 12 bytes, but data_offsets \[0, 8\] hold 8",
    ),
    "gap": (
        lambda p: _file(p, {"a": _entry(offsets=[4, 12])}, bytes(12)),
        "file not fully covered: 'a' begins at byte",
    ),
    "overlap": (
        lambda p: _file(p, {"a": _entry(), "b": _entry(offsets=[4, 12])}, bytes(12)),
        "file not fully covered: 'b' begins at byte",
    ),
    "directory": (lambda p: p.mkdir(), "header cannot be read: Is a directory"),
    "missing": (lambda p: None, "cannot be opened: No such file or directory"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_file_is_refused_with_its_name_and_likely_cause(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "x.safetensors"
    spoil(path)
    with pytest.raises(CheckpointError, match=rf"(?s)x\.safetensors.*{message}"):
        Shard(path)


def test_refused_file_is_closed_again(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.safetensors", [1])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CheckpointError):
            Shard(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_file_cut_short_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.safetensors", {"a": _entry()}, bytes(8))
    shard = Shard(path)
    os.truncate(path, shard.size - 1)
    with pytest.raises(CheckpointError, match="'a' ends early: the file was cut short after"):
        shard.read("a")
    shard.close()


def test_closed_file_says_so_and_closes_twice(tmp_path: Path) -> None:
    shard = Shard(_file(tmp_path / "x.safetensors", {"a": _entry()}, bytes(8)))
    shard.close()
    shard.close()
    with pytest.raises(CheckpointError, match="'a' cannot be read: the checkpoint was closed"):
        shard.read("a")
