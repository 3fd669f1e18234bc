"""Eager calls of a client on a device: the host reads each outcome, and sends again what it lacks.

Shape suffixes: see ``ops/pair_table.py``; T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_eaas.config import ClientConfig
from torch_eaas.device.client_calls import DeviceCall, DeviceStages
from torch_eaas.device.client_failover import DeviceFailover, Patience
from torch_eaas.device.client_tables import DeviceTables
from torch_eaas.device.client_words import Report


class EagerCalls:
    """Ends calls outside of a step.

    In `partial` mode the answers that have come are added first, and only what is missing is asked
    for again. In `exact` mode everything is, so that the bits do not depend on the failure.

    Args:
        config: The client's options.
        stages: Launches the stages.
        tables: What the kernels know.
        failover: Decides on failures.
    """

    def __init__(
        self,
        config: ClientConfig,
        stages: DeviceStages,
        tables: DeviceTables,
        failover: DeviceFailover,
    ) -> None:
        self._is_exact = config.combine == "exact"
        self._stages = stages
        self._tables = tables
        self._failover = failover

    def finish(self, call: DeviceCall, add_TD: Tensor | None) -> Tensor:
        """Return the sum of all answers and ``add_TD``, in the caller's dtype; see ``combine``."""
        patience: Patience | None = None
        sum_TD: Tensor | None = None
        while True:
            report = call.words.read()
            if report.is_good:
                break
            patience = patience or self._failover.begin(own=1)
            if not self._is_exact:
                # before the tables change: the answers lie in windows that they name
                sum_TD = self._stages.add_some(call, self._answered(report), sum_TD)
            patience.learn(report)
            call.words.clear()
            self._stages.send(call)
            self._stages.wait(call)
        self._failover.note(report)
        if sum_TD is None:
            return self._stages.add(call, add_TD)
        every_P = torch.ones_like(call.lane.arrivals_P, dtype=torch.bool)
        sum_TD = self._stages.add_some(call, every_P, sum_TD)
        return (sum_TD if add_TD is None else sum_TD + add_TD.detach()).to(call.dtype)

    def _answered(self, report: Report) -> Tensor:
        """Return which pairs have answered, ``(P,)`` bool."""
        pairs = len(self._tables.pairs_PC)
        told = [pair in report.answered for pair in range(pairs)]
        return torch.tensor(told, device=self._tables.pairs_PC.device)
