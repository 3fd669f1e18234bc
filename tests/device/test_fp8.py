"""Clients and servers on a device, with fp8 on the wire; here a CPU plays the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device_served import D as HALVED_D
from tests.device_served import E as HALVED_E
from tests.device_served import every_expert, inputs, moe_sum, world
from tests.monitor.planned import wait_until
from tests.ops.implementations import use_kernels
from tests.ops.processes import needs_x86
from tests.served import LAYERS, D, E, K, batch
from tests.served_slabs import SPEC, T, client_of, server_of, slab
from tests.test_fp8_wire import kept
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.config import ClientConfig
from torch_eaas.device import client_calls as device_client_calls
from torch_eaas.device.captured_step import CapturedStep
from torch_eaas.device.client import DeviceClient
from torch_eaas.ops import row_quantizer
from torch_eaas.protocol.layout import PairSpec

pytestmark = needs_x86

FP8_SPEC = PairSpec(**{**SPEC.to_json(), "wire_dtype": "fp8"})
HALVES = (every_expert(1)[:2], every_expert(1)[2:])


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["twins", "kernels"])
def stages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a client's stages as twins, and as interpreted kernels; fp8 is made by the CPU's cast."""
    if request.param == "kernels":
        use_kernels(monkeypatch)
        # a kernel's wait has no clock in the interpreter, where a look takes milliseconds
        monkeypatch.setattr(device_client_calls, "LOOKS", 500)


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_host_driven_servers_answer_what_fp8_keeps_eagerly_and_replayed(combine: str) -> None:
    with world(*HALVES) as servers:
        client = servers.client(combine=combine, wire_dtype="fp8")
        x_TD, *routed = inputs()
        x_TD = x_TD + 0.3
        expected_TD = moe_sum(kept(x_TD), *routed)
        assert x_TD.shape[1] == HALVED_D
        assert not torch.equal(kept(x_TD), x_TD)

        def layer() -> Tensor:
            return client.combine(client.dispatch(0, x_TD, *routed, num_experts=HALVED_E))

        assert torch.equal(layer(), expected_TD)
        step = CapturedStep(client, layer)
        assert torch.equal(step.run(), expected_TD)
        # what is replayed quantises anew
        x_TD.mul_(-3.0)
        assert torch.equal(step.run(), moe_sum(kept(x_TD), *routed))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_the_smallest_batches_travel_in_fp8(num_tokens: int) -> None:
    with world(*HALVES) as servers:
        client = servers.client(wire_dtype="fp8")
        x_TD, *routed = inputs(num_tokens)
        out_TD = client.combine(client.dispatch(0, x_TD, *routed, num_experts=HALVED_E))
        assert torch.equal(out_TD, moe_sum(kept(x_TD), *routed))


@pytest.mark.parametrize("storage", ["fp8", "bf16", "fp32"])
def test_a_device_server_gives_a_device_client_what_it_gives_a_host_driven_one(
    storage: Any,
) -> None:
    config = ClientConfig(
        hidden_size=D, top_k=K, max_tokens=T, max_micro_batches=1, wire_dtype="fp8"
    )
    transport = SharedMemoryTransport()
    with (
        server_of(slab(storage=storage), FP8_SPEC).serve_in_background() as server,
        client_of(server, wire_dtype="fp8") as host,
        DeviceClient(config, servers=[server.address], transport=transport) as device,
    ):
        wait_until(lambda: bool(device._connections.live))
        for layer in LAYERS:
            inputs_3 = batch(T, layer, low=-1)
            out, expected = (
                client.combine(client.dispatch(layer, *inputs_3, num_experts=E))
                for client in (device, host)
            )
            assert out.abs().max() > 0
            assert torch.equal(out, expected)


def test_fp8_experts_take_the_tokens_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        server_of(slab(storage="fp8"), FP8_SPEC) as server,
        client_of(server, wire_dtype="fp8") as client,
    ):
        number = client.dispatch(LAYERS[0], *batch(3), num_experts=E)

        def refuse(*_: object) -> None:
            raise AssertionError("the server quantised what was quantised")

        monkeypatch.setattr(row_quantizer, "_op", refuse)
        assert server.step() == 1
        client.combine(number)
