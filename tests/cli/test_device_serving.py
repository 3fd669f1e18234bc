"""``torch-eaas server --device``: a checkpoint's experts in a slab; here a CPU plays the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launched import SHAKESPEARE

from torch_eaas.access import OPEN
from torch_eaas.cli import main as cli
from torch_eaas.cli import serving
from torch_eaas.cli.generating import client_config
from torch_eaas.cli.serving import PairOptions, ServeOptions
from torch_eaas.client import Client
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.moe import read_experts, read_shape


def options(**changed: Any) -> ServeOptions:
    fields: dict[str, Any] = {
        "checkpoint": SHAKESPEARE,
        "monitor": None,
        "share": (0, 1),
        "copies": 1,
        "experts": None,
        "room": None,
        "storage": "fp32",
        "name": "device",
        "address": "",
        "max_rows": 64,
        "threads": 1,
        "transport": "shared_memory",
        "trace": None,
        "device": "cpu",
        "pairs": PairOptions(max_clients=1),
        "access": OPEN,
    }
    return ServeOptions(**{**fields, **changed})


def test_a_checkpoint_in_a_slab_answers_a_client_with_the_defaults_of_generate() -> None:
    with Checkpoint(SHAKESPEARE) as checkpoint:
        shape = read_shape(checkpoint)
        layer, held = shape.moe_layers[-1], {shape.moe_layers[-1]: (1, 2)}
        slab = serving.make_experts(options(room=3), shape, held)
        serving._read_into(slab, checkpoint, held, "fp32")
        [(_, weights)] = read_experts(checkpoint, layer, [2], storage="fp32")
    assert slab.holdings == held
    # its own experts' slots, and room for three more
    assert getattr(slab, "num_free", None) == 3
    made = torch.Generator().manual_seed(0)
    x = torch.randn(3, shape.hidden_size, generator=made)
    ids = torch.full((3, shape.top_k), -1)
    ids[:, 0] = 2
    config = client_config(shape, name="client", combine="partial", access=OPEN)
    with (
        serving.make_server(options(), shape, slab).serve_in_background() as server,
        Client(config, servers=[server.address]) as client,
    ):
        ticket = client.dispatch(
            layer, x, ids, torch.ones(ids.shape), num_experts=shape.num_experts
        )
        got = client.combine(ticket)
    gate, up, down = weights.dequantized()
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_load_that_the_monitor_asks_for_goes_into_free_slots() -> None:
    with Checkpoint(SHAKESPEARE) as checkpoint:
        shape = read_shape(checkpoint)
    slab = serving.make_experts(options(room=2), shape, {})
    layer = shape.moe_layers[0]
    serving._loader(options(room=2), shape, slab)([(layer, 0), (layer, 5)])
    assert slab.holdings == {layer: (0, 5)}
    assert getattr(slab, "num_free", None) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_log_to_stderr", lambda level: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["server", str(SHAKESPEARE), "--device", "cuda"]) == 1
    assert "finds no CUDA GPU; check nvidia-smi and that torch was" in capsys.readouterr().err


def test_a_device_that_is_none_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["server", str(SHAKESPEARE), "--device", "tpu"])
    assert "must be cpu, cuda or cuda:N, got 'tpu'" in capsys.readouterr().err
