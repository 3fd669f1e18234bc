"""A checkpoint that lacks a tensor, or holds one that has no use, is refused with all names."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_eaas.errors import CheckpointError
from torch_eaas.models import load
from torch_eaas.models.load import load_client, load_local

LAYER_1 = "model.layers.1.mlp."
EXPERT = LAYER_1 + "experts.3.up_proj.weight"


@pytest.fixture(autouse=True)
def _no_remote_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RemoteExperts", lambda client, **sizes: nn.Identity())


def _client(path: Path) -> Any:
    return load_client(path, SimpleNamespace(config=SimpleNamespace(hidden_size=144)))


def _rename(stored: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name.replace("up_proj", "upp_proj")] = stored.pop(name)


def _drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.__delitem__(name)


def _replace(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.update({name: tensor})


ACCOUNTS = [
    pytest.param(
        _rename,
        r"tiny does not fit its config: 1 missing: model.layers.0.mlp.up_proj.weight; "
        # its scales are left without a weight
        r"2 unexpected: .*00003-of-00003.safetensors: model.layers.0.mlp.up_proj.weight_scale_inv, "
        r".*-of-00003.safetensors: model.layers.0.mlp.upp_proj.weight$",
        id="renamed",
    ),
    pytest.param(
        _replace("model.norm.weight", torch.ones(3)),
        r"1 of the wrong shape: model-0000.*: model.norm.weight is \(3,\), not \(144,\)",
        id="wrong-shape",
    ),
    pytest.param(
        _drop(LAYER_1 + "gate.e_score_correction_bias"),
        f"1 missing: {LAYER_1}gate.e_score_correction_bias$",
        id="no-bias",
    ),
    pytest.param(
        _drop("model.layers.0.self_attn.o_proj.weight_scale_inv"),
        "1 missing: model.layers.0.self_attn.o_proj.weight_scale_inv$",
        id="no-scale",
    ),
    pytest.param(
        _replace(LAYER_1 + "experts.8.up_proj.weight", torch.ones(1)),
        f"1 unexpected: .*safetensors: {LAYER_1}experts.8.up_proj.weight$",
        id="one-expert-too-many",
    ),
]


@pytest.mark.parametrize("load", [load_local, _client], ids=["local", "client"])
@pytest.mark.parametrize(("edit", "message"), ACCOUNTS)
def test_every_tensor_is_accounted_for(make_tiny, load: Callable, edit, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(make_tiny(edit=edit).path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(
            _drop(EXPERT), f"1 missing: {EXPERT}; 1 unexpected: .*{EXPERT}_sc", id="weight"
        ),
        pytest.param(_drop(EXPERT + "_scale_inv"), f"1 missing: {EXPERT}_scale_inv$", id="scale"),
        pytest.param(
            _replace(EXPERT, torch.ones(144, 136)),
            rf"1 unexpected: .*{EXPERT}_scale_inv; 1 of the wrong shape: .*{EXPERT} is \(144, 1",
            id="shape",
        ),
    ],
)
def test_local_baseline_accounts_for_the_experts_too(make_tiny, edit, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_local(make_tiny(edit=edit).path)


def test_long_lists_of_faults_are_cut(make_tiny) -> None:
    def edit(stored: dict[str, Tensor]) -> None:
        stored.update({f"extra.{i}": torch.ones(1) for i in range(11)})

    with pytest.raises(CheckpointError, match=r"11 unexpected: .*extra\.6 and 3 more$"):
        load_local(make_tiny(edit=edit).path)
