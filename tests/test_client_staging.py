"""Tensors of a GPU and servers on CPUs: pinned copies, one wait, and the answer goes back.

No GPU is here: ``OnDevice`` tensors stand for a GPU's. What is copied from them without blocking
arrives when somebody waits for the device, and not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.served import D, E, K, batch, oracle, served
from torch_eaas.client import Client
from torch_eaas.client_staging import Staging
from torch_eaas.errors import AnomalyError, ConfigError
from torch_eaas.experts import ExpertPool

LATER: list[Callable[[], object]] = []


class OnDevice(Tensor):
    """A tensor that the host cannot read until it has waited."""

    is_cpu = False
    is_cuda = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and isinstance(args[1], OnDevice) and kwargs.get("non_blocking"):
            target, source = args
            LATER.append(lambda: target.copy_(source.as_subclass(Tensor)))
            return target
        assert func is not Tensor.numpy, "the host reads what is on the device"
        return super().__torch_function__(func, types, args, kwargs)


class Device(Staging):
    """A staging that notes what it did."""

    def __init__(self) -> None:
        super().__init__("c", pin=self._pin_like, wait=self._finish)
        LATER.clear()
        self.pinned: list[tuple[int, ...]] = []
        self.waits = 0
        self.came_home = 0

    def _pin_like(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tuple(tensor.shape))
        return torch.empty(tensor.shape, dtype=tensor.dtype).fill_(-77)

    def _finish(self, device: torch.device) -> None:
        self.waits += 1
        for copy in LATER:
            copy()
        LATER.clear()

    def to_device(self, rows_TD: Tensor, device: torch.device) -> Tensor:
        self.came_home += 1
        return super().to_device(rows_TD, device).as_subclass(OnDevice)


def staged(client: Client) -> Device:
    client._staging = Device()
    return client._staging


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.as_subclass(OnDevice) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_of_a_gpus_tensors_waits_once_and_its_answer_goes_back(dtype: torch.dtype) -> None:
    with served(2) as cluster:
        client = cluster.client()
        device = staged(client)
        x, ids, w = batch(5)
        add = torch.full((5, D), 0.5)
        expected = oracle(1, x.to(dtype).float(), ids, w) + 0.5
        ticket = client.dispatch(1, *on_device(x.to(dtype), ids, w), num_experts=E)
        assert (device.waits, device.pinned) == (1, [(5, D), (5, K), (5, K)])
        out = client.combine(ticket, *on_device(add))
        assert isinstance(out, OnDevice)
        assert (device.waits, device.came_home, out.dtype) == (1, 1, dtype)
        bound = max(1e-5, torch.finfo(dtype).eps)
        found = out.as_subclass(Tensor).double()
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_routing_on_the_cpu_is_taken_as_it_is() -> None:
    with served(1) as cluster:
        client = cluster.client()
        device = staged(client)
        x, ids, w = batch(3)
        out = client.combine(client.dispatch(1, *on_device(x), ids, w, num_experts=E))
        assert (device.waits, device.pinned[0], len(device.pinned)) == (1, (3, D), 2)
        found = out.as_subclass(Tensor).double()
        torch.testing.assert_close(found, oracle(1, x, ids, w), rtol=1e-5, atol=1e-5)


def test_a_call_on_the_cpu_goes_through_no_staging() -> None:
    with served(1) as cluster:
        client = cluster.client()
        device = staged(client)
        client.combine(client.dispatch(1, *batch(3), num_experts=E))
        assert (device.waits, device.pinned, device.came_home) == (0, [], 0)


def test_what_staging_costs_is_said_once_for_each_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="torch_eaas.client_staging")
    first, second = Device(), Device()
    for staging in (first, first, second):
        staging.to_host(1, *on_device(torch.ones(2)))
    assert [record.getMessage() for record in caplog.records] == [
        "client c: tensors on cpu, servers on CPUs: each dispatch waits for the device and copies "
        "through pinned memory; a DeviceClient with DeviceServers does without"
    ] * 2


def test_other_devices_and_two_gpus_are_refused() -> None:
    class Elsewhere(OnDevice):
        device = torch.device("cuda", 1)  # type: ignore[assignment]

    one, two = on_device(torch.ones(2))[0], torch.ones(2).as_subclass(Elsewhere)
    staging = Device()
    with pytest.raises(ConfigError, match=r"layer 3: .* on one CUDA device, got cpu, cuda:1"):
        staging.to_host(3, one, two)
    with pytest.raises(ConfigError, match=r"must be on the CPU or on one CUDA device, got meta"):
        staging.to_host(3, torch.ones(2, device="meta"))
    assert staging.waits == 0


def test_a_number_that_is_not_finite_is_found_on_a_gpu_too() -> None:
    with served(1) as cluster:
        client = cluster.client(detect_anomalies=True)
        staged(client)
        x, ids, w = batch(3)
        x[1, 4] = float("nan")
        with pytest.raises(AnomalyError, match="layer 1, token 1: a hidden state is not finite"):
            client.dispatch(1, *on_device(x, ids, w), num_experts=E)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let torch say what the last entry is: whether a capture is under way."""
    said = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: said[-1])
    return said


def test_a_client_in_a_capture_says_what_can_be_captured(capture: list[bool]) -> None:
    with served(1) as cluster:
        client = cluster.client()
        device = staged(client)
        given = on_device(*batch(3))
        message = (
            r"client client is driven by the host, and a CUDA graph captures nothing that the host "
            r"does; use a DeviceClient, whose servers are on GPUs \(DeviceServer\), or call it "
            r"outside the capture"
        )
        client._staging._name = "client"
        capture.append(True)
        with pytest.raises(ConfigError, match=message):
            client.dispatch(1, *given, num_experts=E)
        assert (device.waits, client.counters()) == (0, {})
        capture.append(False)
        ticket = client.dispatch(1, *given, num_experts=E)
        capture.append(True)
        with pytest.raises(ConfigError, match=message):
            client.combine(ticket)
        capture.append(False)
        # the refused call has freed its slots
        for _ in range(2 * client.config.slots):
            client.combine(client.dispatch(1, *given, num_experts=E))


def test_a_pool_in_a_capture_and_tokens_of_a_gpu_are_refused(capture: list[bool]) -> None:
    pool = ExpertPool(D, 8)
    groups_TK, weights_TK = torch.full((2, K), -1), torch.ones(2, K)
    assert pool(torch.ones(2, D), groups_TK, weights_TK).count_nonzero() == 0
    with pytest.raises(
        ConfigError, match="runs on the CPU, got a tensor on meta; on a GPU use an E"
    ):
        pool(torch.ones(2, D, device="meta"), groups_TK, weights_TK)
    capture.append(True)
    with pytest.raises(
        ConfigError,
        match=r"an ExpertPool is driven by the host.*use an ExpertSlab in a DeviceServer",
    ):
        pool(torch.ones(2, D), groups_TK, weights_TK)
