"""What is captured runs again as it is; on a CPU that is the calls themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_eaas.device.captured import Captured


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_each_replay_runs_the_work_once_more_on_whatever_its_inputs_hold_now(warmups: int) -> None:
    x = torch.zeros(3)
    runs = torch.zeros(1)

    def work() -> Tensor:
        runs.add_(1)
        return x + 1

    captured = Captured(work, device="cpu", warmups=warmups)
    assert runs.item() == warmups
    for i in range(1, 4):
        x.fill_(i)
        captured.replay()
        assert captured.outputs.tolist() == [i + 1] * 3
        assert runs.item() == warmups + i
