"""A client's tables on a GPU that is not the current one: its events are that GPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from torch_eaas.device.client_pairs import DeviceConnection
from torch_eaas.device.client_staging import Staged
from torch_eaas.device.client_tables import DeviceTables

DEVICE = torch.device("cuda", 1)


class OnGpu:
    """A tensor of a GPU, as far as it is written."""

    is_cuda, shape, dtype, device = True, (2,), torch.int64, DEVICE

    def copy_(self, source: object, non_blocking: bool = False) -> None: ...


class Event:
    """Notes where it is recorded."""

    recorded: list[str]

    def record(self, stream: str = "the current GPU's stream") -> None:
        Event.recorded.append(stream)

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the streams on which events are recorded."""
    Event.recorded = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s stream")
    return Event.recorded


def test_the_next_write_waits_for_the_copy_on_the_tables_gpu(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *args, **more: OnGpu())
    Staged(cast("Tensor", OnGpu())).write(torch.zeros(2))
    assert events == ["cuda:1's stream"]


def test_windows_are_kept_until_the_tables_gpu_has_left_them(events: list[str]) -> None:
    tables: Any = SimpleNamespace(_device=DEVICE, _leaving=[])
    tables._let_go = lambda: DeviceTables._let_go(tables)
    conn = cast("DeviceConnection", SimpleNamespace(is_seated=True))
    DeviceTables._see_off(tables, [conn])
    assert events == ["cuda:1's stream"]
    assert conn.is_seated
