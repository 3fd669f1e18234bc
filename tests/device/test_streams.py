"""Which GPU and which stream work goes to; torch's part of it is played by stand-ins."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch

from tests.device_served import call, every_expert, inputs, moe_sum, world
from tests.monitor.planned import wait_until
from tests.ops.implementations import use_kernels
from tests.ops.processes import needs_x86
from torch_eaas.device import client_staging, client_tables
from torch_eaas.device.captured import Captured
from torch_eaas.device.client_staging import Staged
from torch_eaas.device.stream import DeviceStream, finish_all, undisturbed

GPU = torch.device("cuda", 1)


class Stream:
    """Stands for a stream, and knows what it was made with."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.waits = 0

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None:
        self.waits += 1


class Event:
    """Stands for an event; it is passed once a test says so."""

    streams: ClassVar[list[object]] = []
    passed = False

    def record(self, stream: object = None) -> None:
        Event.streams.append(stream)

    def query(self) -> bool:
        return Event.passed

    def synchronize(self) -> None: ...


class Cuda:
    """Notes captures and waits; ``under_way`` is how many there are of both at once."""

    def __init__(self) -> None:
        self.captured_on: list[Any] = []
        self.mode = ""
        self.under_way = self.most = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        # others may come here now
        threading.Event().wait(0.01)
        try:
            yield
        finally:
            self.under_way -= 1

    @contextmanager
    def graph(self, _: object, *, stream: object, capture_error_mode: str) -> Iterator[None]:
        self.captured_on.append(stream)
        self.mode = capture_error_mode
        with self.busy():
            yield

    def synchronize(self, device: object) -> None:
        with self.busy():
            pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    stands = {
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "current_stream": lambda device=None: Stream(device),
        "Stream": Stream,
        "CUDAGraph": object,
        "graph": made.graph,
        "synchronize": made.synchronize,
    }
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    return made


def test_each_capture_has_a_stream_of_its_own(cuda: Cuda) -> None:
    runs = []
    for _ in range(2):
        Captured(lambda: runs.append(1), device=GPU)
    first, second = cuda.captured_on
    assert first is not second
    # once to warm up and once to be captured
    assert len(runs) == 4
    assert cuda.mode == "thread_local"


def test_nothing_is_collected_while_a_graph_is_captured(cuda: Cuda) -> None:
    collects = []
    Captured(lambda: collects.append(gc.isenabled()), device=GPU)
    assert collects == [True, False]
    assert gc.isenabled()


def test_captures_and_waits_for_a_device_exclude_each_other(cuda: Cuda) -> None:
    threads = [
        threading.Thread(target=work)
        for work in (
            *[lambda: Captured(lambda: None, device=GPU)] * 3,
            *[lambda: finish_all(GPU)] * 3,
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(cuda.captured_on) == 3
    assert cuda.most == 1


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    with undisturbed():
        finish_all(torch.device("cpu"))


def test_a_server_runs_on_no_stream_that_torch_hands_to_models(cuda: Cuda) -> None:
    stream = DeviceStream(GPU, is_first=True)._stream
    assert stream is not None
    assert (stream.device, stream.priority) == (GPU, -1)


def test_a_copy_is_marked_where_it_was_enqueued_and_not_on_the_current_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Event, "streams", [])
    monkeypatch.setattr(client_staging, "current_stream", lambda device: str(device))
    staged = Staged(torch.zeros(2))
    staged._copied = Event()  # type: ignore[assignment]
    staged.write(torch.tensor([1.0, 2.0]))
    assert staged.on_device.tolist() == [1, 2]
    assert Event.streams == ["cpu"]


@needs_x86
def test_tables_are_there_for_all_streams_and_windows_stay_until_no_kernel_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(GPU)
    finished: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(Event, "streams", [])
    monkeypatch.setattr(Event, "passed", False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(client_tables, "current_stream", lambda device: stream)
    held = every_expert(2)
    with world(held, held) as servers:
        client = servers.client()
        tables = client._tables
        tables._device = GPU
        monkeypatch.setattr(
            client_tables,
            "finish_all",
            lambda device: finished.append((device, sum(map(bool, tables._seats)))),
        )
        monkeypatch.setattr(
            tables, "_full", lambda shape, value, dtype: torch.full(shape, value, dtype=dtype)
        )
        tables.refresh()
        assert stream.waits == 1
        # without changes it costs nothing
        tables.refresh()
        assert stream.waits == 1
        tables.add(0, 4)
        assert stream.waits == 2

        [gone] = [conn for conn in client._connections.live.values() if conn.name == "s0"]
        servers.servers[0].close()
        wait_until(lambda: len(client._connections.live) == 1)
        tables.refresh()
        assert Event.streams == [stream]
        assert gone.is_seated
        monkeypatch.setattr(Event, "passed", True)
        tables.refresh()
        assert not gone.is_seated
        client.close()
        # while it still held the other one
        assert finished == [(GPU, 1)]


@needs_x86
@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_what_failures_need_is_loaded_without_a_look_into_a_window(
    combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch)
    with world(every_expert(1)) as servers, torch.no_grad():
        client = servers.client(combine=combine)
        # no row is taken yet, and at address 0 there is nothing
        assert not client._tables.pairs_PC.any()
        client._stages.load_what_failures_need()
        x_TD, ids_TK, weights_TK = inputs()
        out_TD = call(client, x_TD, ids_TK, weights_TK)
        assert torch.equal(out_TD, moe_sum(x_TD, ids_TK, weights_TK))
