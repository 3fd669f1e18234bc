"""transformers' model, filled by the library's reader, gives what transformers itself gives."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_eaas.errors import CheckpointError, ConfigError
from torch_eaas.models import load
from torch_eaas.models.load import load_client, load_local

CLIENT: Any = SimpleNamespace(config=SimpleNamespace(hidden_size=144))
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


class LocalExperts(nn.Module):
    """Stands in for RemoteExperts: the reference model's own experts run as the servers."""

    def __init__(self, client: Any, *, layer: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        assert (num_experts, top_k) == (8, 3)
        self.run = lambda *routed: client.model.layers[layer].mlp.experts(*routed)

    def forward(self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        assert (experts_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
        return self.run(hidden_TD, experts_TK, weights_TK)


@pytest.fixture(autouse=True)
def _local_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RemoteExperts", LocalExperts)


def reference(tiny, dtype: torch.dtype = torch.float32) -> Any:
    """Build transformers' model in memory and fill it with the weights as they are meant."""
    kept = {k: v for k, v in tiny.config.items() if k not in ("quantization_config", "auto_map")}
    config = transformers.DeepseekV3Config(**kept)
    model = transformers.DeepseekV3ForCausalLM._from_config(
        config, dtype=dtype, experts_implementation="eager"
    )
    last = f"model.layers.{config.num_hidden_layers}."
    state = {name: w for name, w in tiny.plain.items() if not name.startswith(last)}
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([state.pop(f"{prefix}{e}.{part}.weight") for e in range(8)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        state[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[prefix + "down_proj"] = down
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    # routers stay fp32; not all of transformers' releases see to that when a model is built
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.float()
    for name, tensor in model.state_dict().items():
        if ".mlp.gate." in name:
            tensor.copy_(state[name])
    return model.eval()


def loaders(client: Any) -> dict[str, Callable[..., Any]]:
    return {
        "local": load_local,
        "client": lambda path, **options: load_client(path, client, **options),
    }


BOTH = pytest.mark.parametrize("loader", ["local", "client"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@BOTH
@DTYPES
@pytest.mark.parametrize("fp8", [True, False], ids=["from-fp8", "from-bf16"])
@torch.no_grad()
def test_logits_are_those_of_the_same_model_filled_by_hand(
    make_tiny, loader: str, dtype: torch.dtype, fp8: bool
) -> None:
    tiny = make_tiny(fp8=fp8)
    expected = reference(tiny, dtype)
    model = loaders(expected)[loader](tiny.path, dtype=dtype)
    assert type(model) is transformers.DeepseekV3ForCausalLM
    assert model.dtype == model.config.dtype == dtype
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


@BOTH
def test_generate_gives_the_same_tokens(tiny, loader: str) -> None:
    expected = reference(tiny)
    model = loaders(expected)[loader](tiny.path)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    found = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    wanted = expected.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    assert torch.equal(found, wanted)


@BOTH
def test_model_is_ready_for_inference_and_says_where_it_came_from(tiny, loader: str) -> None:
    model = loaders(reference(tiny))[loader](tiny.path)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert not hasattr(model.config, "quantization_config")
    assert model.name_or_path == str(tiny.path)


@BOTH
def test_router_stays_in_fp32_and_all_else_takes_the_dtype(tiny, loader: str) -> None:
    model = loaders(reference(tiny))[loader](tiny.path, dtype=torch.bfloat16)
    gates = {name: t for name, t in model.state_dict().items() if ".mlp.gate." in name}
    assert len(gates) == 4
    for name, tensor in gates.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, tiny.plain[name])
    others = {t.dtype for name, t in model.state_dict().items() if name not in gates}
    assert others == {torch.bfloat16}


@BOTH
def test_computed_buffers_are_made_anew_in_fp32(tiny, loader: str) -> None:
    expected = reference(tiny)
    model = loaders(expected)[loader](tiny.path, dtype=torch.bfloat16)
    found, wanted = dict(model.named_buffers()), dict(expected.named_buffers())
    assert found.keys() == wanted.keys()
    for name in ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"):
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], wanted[name])


class Allocations(TorchDispatchMode):
    """Record the shape of every tensor that has memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            self.shapes.add(tuple(result.shape))
        return result


def test_client_neither_reads_nor_allocates_an_expert(tiny, reads) -> None:
    client = reference(tiny)
    with Allocations() as seen:
        model = load_client(tiny.path, client)
    fused = {(8, 2 * 136, 144), (8, 144, 136)}
    assert not seen.shapes & (fused | {(136, 144), (144, 136)})
    assert seen.shapes >= {(2 * 136, 144), (144, 2 * 136)}, "the shared experts"
    routed = {tiny.ranges(name) for name in tiny.files if ".mlp.experts." in name}
    assert not routed & set(reads)
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in client.parameters())
    assert isinstance(model.model.layers[1].mlp.experts, LocalExperts)
    assert not any(".mlp.experts." in name for name in model.state_dict())


def test_local_baseline_does_allocate_the_experts(tiny) -> None:
    with Allocations() as seen:
        load_local(tiny.path)
    assert {(8, 2 * 136, 144), (8, 144, 136)} <= seen.shapes


def test_client_reads_every_other_tensor_exactly_once(tiny, reads) -> None:
    load_client(tiny.path, reference(tiny))
    own = {n for n in tiny.files if ".mlp.experts." not in n and ".layers.3." not in n}
    # headers are read from bytes 0 and 8
    assert sorted(read for read in reads if read[1] > 8) == sorted(map(tiny.ranges, own))


def test_client_does_without_files_that_hold_experts_only(make_tiny) -> None:
    tiny = make_tiny()
    client = reference(tiny)
    # experts into a file of their own, which is then not there
    files = {
        name: "experts.safetensors" if ".mlp.experts." in name else file
        for name, file in tiny.files.items()
    }
    index = tiny.path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    load_client(tiny.path, client)


@BOTH
def test_mtp_layer_is_skipped_with_one_line(tiny, loader: str, caplog) -> None:
    caplog.set_level(logging.INFO, "torch_eaas")
    loaders(reference(tiny))[loader](tiny.path)
    lines = [r.getMessage() for r in caplog.records if r.name == "torch_eaas.models.load"]
    assert lines == ["MTP layer(s) 3 skipped (num_nextn_predict_layers=1)"]


@BOTH
def test_checkpoint_without_mtp_layer_says_nothing(make_tiny, loader: str, caplog) -> None:
    caplog.set_level(logging.INFO, "torch_eaas")
    tiny = make_tiny(num_nextn_predict_layers=0)
    loaders(reference(tiny))[loader](tiny.path)
    assert not caplog.records


@pytest.mark.parametrize("head_on_disk", [False, True], ids=["left-out", "on-disk-too"])
@BOTH
@torch.no_grad()
def test_tied_weights_are_one_tensor(make_tiny, loader: str, head_on_disk: bool) -> None:
    def edit(stored: dict[str, Tensor]) -> None:
        if head_on_disk:
            stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()

    tiny = make_tiny(tie_word_embeddings=True, edit=edit)
    expected = reference(tiny)
    model = loaders(expected)[loader](tiny.path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


@BOTH
def test_generation_config_is_taken_from_its_file(make_tiny, loader: str) -> None:
    tiny = make_tiny()
    settings = {"do_sample": True, "eos_token_id": [7, 8], "temperature": 0.6}
    (tiny.path / "generation_config.json").write_text(json.dumps(settings))
    found = loaders(reference(tiny))[loader](tiny.path).generation_config
    assert (found.do_sample, found.eos_token_id, found.temperature) == (True, [7, 8], 0.6)


def test_broken_generation_config_is_refused(make_tiny) -> None:
    tiny = make_tiny()
    (tiny.path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: cannot be used"):
        load_local(tiny.path)


def test_old_rotary_tensors_are_ignored(make_tiny) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_local(make_tiny(edit=lambda stored: stored.update({name: torch.ones(16)})).path)


@torch.no_grad()
def test_experts_implementation_is_the_callers_choice(tiny) -> None:
    model = load_local(tiny.path, experts_implementation="grouped_mm")
    assert model.config._experts_implementation == "grouped_mm"
    torch.testing.assert_close(model(IDS).logits, reference(tiny)(IDS).logits, rtol=1e-4, atol=1e-4)


def test_importing_the_loader_does_not_import_transformers() -> None:
    code = "import sys, torch_eaas.models.load; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@BOTH
def test_missing_transformers_says_what_to_install(tiny, loader: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"transformers; run: pip install 'torch-eaas\[hf\]'"):
        loaders(CLIENT)[loader](tiny.path)


def test_old_transformers_is_refused(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    # by name: transformers puts another object there while it loads its parts
    monkeypatch.setattr("transformers.__version__", "5.6.2")
    with pytest.raises(
        ConfigError, match=r"transformers must be at least 5.7, got 5.6.2; run: pip"
    ):
        load_local(tiny.path)


def test_config_that_transformers_refuses_is_named(make_tiny) -> None:
    tiny = make_tiny(rms_norm_eps="small")
    with pytest.raises(
        ConfigError, match=r"tiny/config.json: transformers cannot build this model"
    ):
        load_local(tiny.path)


def test_model_of_another_kind_is_refused_before_anything_is_built(make_tiny) -> None:
    tiny = make_tiny(model_type="gpt2")
    with pytest.raises(ConfigError, match="model_type 'gpt2' is not known, known are deepseek_v3"):
        load_client(tiny.path, CLIENT)


def test_client_for_another_width_is_refused(tiny) -> None:
    client: Any = SimpleNamespace(config=SimpleNamespace(hidden_size=128))
    message = (
        "the model has hidden_size 144, its client 128; give the client the model's hidden_size"
    )
    with pytest.raises(ConfigError, match=message):
        load_client(tiny.path, client)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn], ids=str)
def test_dtype_that_no_model_runs_in_is_refused(tiny, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"dtype must be one of .*torch.bfloat16.*, got torch\."):
        load_local(tiny.path, dtype=dtype)
