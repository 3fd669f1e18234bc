"""What is captured runs again as it is; on a CPU that is the calls themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.served_slabs import slab
from torch_eaas.device import captured, expert_slab, slab_memory
from torch_eaas.device.captured import Captured
from torch_eaas.device.stream import DeviceStream


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_each_replay_runs_the_work_once_more_on_whatever_its_inputs_hold_now(warmups: int) -> None:
    x = torch.zeros(3)
    runs = torch.zeros(1)

    def work() -> Tensor:
        runs.add_(1)
        return x + 1

    ran = Captured(work, device="cpu", warmups=warmups)
    assert runs.item() == warmups
    for i in range(1, 4):
        x.fill_(i)
        ran.replay()
        assert ran.outputs.tolist() == [i + 1] * 3
        assert runs.item() == warmups + i


class Streams:
    """Notes which streams are made, and on which one a capture runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[torch.device, int]] = []
        self.captured_on: list[Any] = []
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph", self._graph)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def _stream(self, device: torch.device, priority: int = 0) -> tuple[torch.device, int]:
        self.made.append((device, priority))
        return self.made[-1]

    def _graph(
        self, graph: object, *, stream: Any, capture_error_mode: str
    ) -> AbstractContextManager[None]:
        assert capture_error_mode == "thread_local"
        self.captured_on.append(stream)
        return nullcontext()


@pytest.mark.parametrize(("is_first", "priority"), [(False, 0), (True, -1)], ids=["usual", "first"])
def test_a_capture_has_a_stream_of_its_own_on_its_device_and_of_its_priority(
    is_first: bool, priority: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(monkeypatch)
    monkeypatch.setattr(captured, "side_stream", lambda device: nullcontext())
    Captured(lambda: None, device="cuda:1", is_first=is_first)
    assert streams.captured_on == [(torch.device("cuda:1"), priority)]


def test_streams_that_go_first_are_none_that_others_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    DeviceStream(torch.device("cuda:1"))
    DeviceStream(torch.device("cuda:1"), is_first=True)
    assert [priority for _, priority in streams.made] == [0, -1]


def test_a_slab_is_read_and_loaded_on_streams_that_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def noted(device: torch.device, *, is_first: bool = False) -> DeviceStream:
        asked.append(is_first)
        return DeviceStream(device)

    for module in (expert_slab, slab_memory):
        monkeypatch.setattr(module, "DeviceStream", noted)
    slab()
    assert asked == [True, True]
