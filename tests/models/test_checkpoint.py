"""A checkpoint directory is read tensor by tensor, and FP8 comes back with its own blocks."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from torch_eaas.errors import CheckpointError, ConfigError
from torch_eaas.models.checkpoint import Checkpoint

EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
SCALE = EXPERT + "_scale_inv"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


def _single(path: Path, tensors: dict[str, Tensor], block: list[int] | None = None) -> Path:
    save_file(tensors, path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    (path / "config.json").write_text(json.dumps(config if block else {}))
    return path


def test_index_names_every_tensor_and_config_is_there(tiny) -> None:
    with Checkpoint(tiny.path) as checkpoint:
        assert checkpoint.names == tiny.stored.keys()
        assert checkpoint.config == tiny.config
        assert checkpoint.block == (128, 128)


def test_nothing_is_read_before_it_is_asked_for(tiny, reads) -> None:
    with Checkpoint(tiny.path) as checkpoint:
        assert (reads, checkpoint.bytes_read, checkpoint.header_bytes_read) == ([], 0, 0)
        checkpoint.info(EXPERT)
        assert checkpoint.bytes_read == 0
        assert {file for file, _, _ in reads} == {tiny.files[EXPERT]}
        assert max(end for _, _, end in reads) == checkpoint.header_bytes_read


@pytest.mark.parametrize("num_threads", [1, 4])
def test_only_the_tensors_own_bytes_are_read_and_counted(tiny, reads, num_threads: int) -> None:
    names = [name for name in tiny.plain if ".experts.5." in name]
    with Checkpoint(tiny.path) as checkpoint:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda name: checkpoint.read_weight(name, torch.float32), names))
        wanted = {tiny.ranges(n) for name in names for n in (name, name + "_scale_inv")}
        headers = {file: 8 + _header_length(tiny.path / file) for file, _, _ in wanted}
        assert len(headers) == 3
        assert checkpoint.bytes_read == sum(end - start for _, start, end in wanted)
        assert checkpoint.header_bytes_read == sum(headers.values())
        headers_read = {(file, 0, 8) for file in headers} | {(f, 8, n) for f, n in headers.items()}
        assert sorted(reads) == sorted(wanted | headers_read)


def _header_length(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("name", [EXPERT, KV_A], ids=["expert", "144-rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fp8_weight_is_dequantised_with_the_scales_of_another_file(
    tiny, name: str, dtype: torch.dtype
) -> None:
    assert tiny.files[name] != tiny.files[name + "_scale_inv"]
    with Checkpoint(tiny.path) as checkpoint:
        found = checkpoint.read_weight(name, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, tiny.plain[name].to(dtype))


def test_fp8_weight_and_scales_can_be_had_raw(tiny) -> None:
    with Checkpoint(tiny.path) as checkpoint:
        weight, scale = checkpoint.read_blocks(EXPERT)
    assert torch.equal(weight.view(torch.uint8), tiny.stored[EXPERT].view(torch.uint8))
    assert torch.equal(scale, tiny.stored[SCALE])


def test_plain_weight_is_cast(tiny) -> None:
    with Checkpoint(tiny.path) as checkpoint:
        found = checkpoint.read_weight("model.norm.weight", torch.float32)
    assert torch.equal(found, tiny.plain["model.norm.weight"])


@pytest.mark.parametrize("block", [(128, 128), (100, 3), (1, 200)], ids=str)
def test_block_comes_from_the_config_and_not_from_the_shapes(
    tmp_path: Path, block: tuple[int, int]
) -> None:
    # 200 rows under two rows of scales look like blocks of 100 as well as of 128
    stored = torch.randn(200, 5).to(torch.float8_e4m3fn)
    rows, columns = -(-200 // block[0]), -(-5 // block[1])
    scale = torch.rand(rows, columns) + 0.5
    _single(tmp_path, {"w": stored, "w_scale_inv": scale}, list(block))
    with Checkpoint(tmp_path) as checkpoint:
        found = checkpoint.read_weight("w", torch.float32)
    for i in range(200):
        for j in range(5):
            expected = stored[i, j].float() * scale[i // block[0], j // block[1]]
            assert found[i, j] == expected


def test_single_file_needs_no_index(tmp_path: Path) -> None:
    _single(tmp_path, {"w": torch.ones(2)})
    with Checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.names == {"w"}
        assert torch.equal(checkpoint.read("w"), torch.ones(2))
        assert len(checkpoint.fingerprint) == 16


def test_fingerprint_is_that_of_config_and_index(tiny, make_tiny) -> None:
    with Checkpoint(tiny.path) as checkpoint, Checkpoint(make_tiny(eos_token_id=2).path) as other:
        files = ("config.json", "model.safetensors.index.json")
        text = b"".join((tiny.path / file).read_bytes() for file in files)
        assert checkpoint.fingerprint == hashlib.sha256(text).hexdigest()[:16]
        assert checkpoint.fingerprint != other.fingerprint


def test_closed_checkpoint_reads_nothing_more(tiny) -> None:
    checkpoint = Checkpoint(tiny.path)
    checkpoint.read("model.norm.weight")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="the checkpoint was closed"):
        checkpoint.read("model.norm.weight")


def _drop_scale(stored: dict[str, Tensor]) -> None:
    del stored[SCALE]


def _set_scale(scale: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.update({SCALE: scale})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(
            _drop_scale,
            rf"0000\d-of-00003.safetensors: {EXPERT} \(float8_e4m3fn \(136, 144\)\): "
            rf"has no scales; expected {SCALE}",
            id="missing",
        ),
        pytest.param(
            _set_scale(torch.ones(1, 2)),
            rf"00003-of-00003.safetensors: {SCALE} \(float32 \(1, 2\)\): expected float32 "
            r"\(2, 2\), one scale per block \(128, 128\) of \(136, 144\)",
            id="wrong-shape",
        ),
        pytest.param(_set_scale(torch.ones(2, 2).half()), "expected float32", id="wrong-dtype"),
    ],
)
def test_scales_that_do_not_fit_are_refused(make_tiny, edit: Callable, message: str) -> None:
    with (
        Checkpoint(make_tiny(edit=edit).path) as checkpoint,
        pytest.raises(CheckpointError, match=message),
    ):
        checkpoint.read_weight(EXPERT, torch.float32)


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {"quant_method": "awq"},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [128]},
    ],
    ids=str,
)
def test_fp8_without_a_block_size_is_refused(make_tiny, quantization: object) -> None:
    tiny = make_tiny(quantization_config=quantization)
    message = "config.json: quantization_config must have quant_method 'fp8' and a weight_block"
    with Checkpoint(tiny.path) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.read_weight(EXPERT, torch.float32)


@pytest.mark.parametrize(
    "weight",
    [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3, 3).to(torch.float8_e5m2)],
    ids=["vector", "e5m2"],
)
def test_other_one_byte_weights_are_refused(tmp_path: Path, weight: Tensor) -> None:
    _single(tmp_path, {"w": weight}, [128, 128])
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"w \(float8_.*: is not an FP8 weight; expected"),
    ):
        checkpoint.read_weight("w", torch.float32)


def _spoil(file: str, text: str | None) -> Callable[[Path], object]:
    path = file
    return lambda root: (root / path).unlink() if text is None else (root / path).write_text(text)


INDEX = "model.safetensors.index.json"
SPOILT = {
    "no-config": (_spoil("config.json", None), "config.json: cannot be read: No such file"),
    "config-no-json": (_spoil("config.json", "<html>"), r"config.json \(6 bytes\): is not JSON"),
    "config-list": (_spoil("config.json", "[]"), "config.json: must be a JSON object, got a list"),
    "no-map": (_spoil(INDEX, "{}"), "index.json: needs a weight_map from tensors to files"),
    "outside": (
        _spoil(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'),
        "'a' must lie in a file beside it, got '../x.safetensors'",
    ),
    "no-name": (_spoil(INDEX, '{"weight_map": {"a": 3}}'), "must lie in a file beside it, got 3"),
    "no-tensors": (_spoil(INDEX, None), "model.safetensors: cannot be opened: No such file"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT.keys())
def test_broken_directory_is_refused_by_file(make_tiny, spoil: Callable, message: str) -> None:
    tiny = make_tiny()
    spoil(tiny.path)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tiny.path)


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: is no directory; a checkpoint is one"):
        Checkpoint(tmp_path / "nowhere")


def test_missing_shard_is_named_when_it_is_needed(make_tiny) -> None:
    tiny = make_tiny()
    (tiny.path / tiny.files[EXPERT]).unlink()
    with (
        Checkpoint(tiny.path) as checkpoint,
        pytest.raises(CheckpointError, match=f"{tiny.files[EXPERT]}: cannot be opened: No such"),
    ):
        checkpoint.read(EXPERT)


def test_unknown_tensor_is_named(tiny) -> None:
    with (
        Checkpoint(tiny.path) as checkpoint,
        pytest.raises(CheckpointError, match="holds no tensor 'nothing'"),
    ):
        checkpoint.read("nothing")


def test_tensor_that_the_index_promises_in_vain_is_named(make_tiny) -> None:
    tiny = make_tiny()
    index = json.loads((tiny.path / INDEX).read_text())
    index["weight_map"]["extra"] = tiny.files[EXPERT]
    (tiny.path / INDEX).write_text(json.dumps(index))
    with (
        Checkpoint(tiny.path) as checkpoint,
        pytest.raises(CheckpointError, match="the index promises 'extra', but the file lacks it"),
    ):
        checkpoint.read("extra")
