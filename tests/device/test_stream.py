"""Devices that are not there are refused; a mirror copies what is new, once; captured work runs."""

from __future__ import annotations

import pytest
import torch

from torch_eaas.device.captured import Captured
from torch_eaas.device.stream import DeviceStream, Mark, Mirror, check_device
from torch_eaas.errors import ConfigError, PeerTimeout

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device: str) -> None:
    message = rf"device is '{device}', but this torch .* finds no CUDA GPU; check nvidia-smi .* cpu"
    with pytest.raises(ConfigError, match=message):
        check_device(device)


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"'cuda:2', but torch finds 2 GPUs here: .* cuda:1; che"):
        check_device("cuda:2")
    assert check_device("cuda:1") == torch.device("cuda", 1)


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="device must be cpu or cuda, got 'meta'"):
        check_device("meta")


class Hanging(Mark):
    """A mark that is never passed."""

    @property
    def is_passed(self) -> bool:
        return False


def test_a_device_that_hangs_is_not_waited_for_for_ever() -> None:
    Mark().wait(0.0)
    message = r"a device has not done within 0\.01 s what .* look at nvidia-smi and restart"
    with pytest.raises(PeerTimeout, match=message):
        Hanging().wait(0.01)


def test_a_mirror_copies_what_is_wanted_and_nothing_else() -> None:
    device = torch.tensor([1, 2])
    mirror = Mirror(device, DeviceStream(CPU))
    # nothing is new: what a kernel wrote stays
    device[0] = 7
    mirror.push()
    assert device.tolist() == [7, 2]
    mirror.wanted = torch.tensor([3, 4])
    mirror.push()
    assert device.tolist() == [3, 4]
    device[0] = 7
    mirror.push()
    assert device.tolist() == [7, 4]


def test_on_a_cpu_each_replay_runs_the_work() -> None:
    number = torch.zeros(1)

    def work() -> torch.Tensor:
        return number.add_(1)

    captured = Captured(work, device="cpu")
    captured.replay()
    captured.replay()
    assert captured.outputs.tolist() == [3]
