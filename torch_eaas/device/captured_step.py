"""A model's step as one graph, which fails over as a whole: the same step is replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_eaas.device.captured import Captured, side_stream
from torch_eaas.device.client import DeviceClient
from torch_eaas.device.client_failover import Patience
from torch_eaas.errors import ConfigError

R = TypeVar("R")


class CapturedStep(Generic[R]):
    """Captures a step with remote experts; servers may come, go, hang and die under it.

    A step must be **repeatable**: one that failed is run again as a whole, so what it reads must
    still be there and what it wrote must not matter. KV is written only at positions that the step
    owns, and no position, random state or output advances before ``run`` has returned.
    ``check_repeatable`` looks for what was forgotten. Inputs lie in tensors that ``fn`` knows, and
    are written before ``run``; a smaller batch than was captured ends with rows of ids -1.

    The first wait that fails ends the step: it costs one ``graph_wait``, not one a layer. Then the
    host reads who failed, changes the tables and replays, for ``request_timeout`` in all, or as
    long as ``recovery_timeout`` while an expert has no holder.

    Args:
        client: Reaches the servers. The caller owns and closes it.
        fn: Runs the model once and returns tensors. It runs at once, eagerly, and is then captured.
        warmups: How often it runs before, at least once.

    Raises:
        ConfigError: ``warmups`` is less than 1.
        ExpertUnavailable: See ``run``; so do the others.
    """

    def __init__(self, client: DeviceClient, fn: Callable[[], R], *, warmups: int = 1) -> None:
        if warmups < 1:
            raise ConfigError(f"warmups must be at least 1, got {warmups}: it makes the tables")
        self.client = client
        self._fn = fn
        with side_stream(client.device):
            for _ in range(warmups):
                self._until_good(self._work)
        self._captured = Captured(self._work, device=client.device, warmups=0)

    def run(self) -> R:
        """Run the step until it has ended well; return what ``fn`` returned.

        On a GPU these are the same tensors each time: the next run overwrites them.

        Raises:
            ExpertUnavailable: An expert had no holder for ``recovery_timeout``.
            PeerTimeout: Servers did not answer, one after the other, for ``request_timeout``.
            RequestRefused: A server refused a request, and nobody else could answer it.
        """
        self._until_good(self._captured.replay)
        return self._captured.outputs

    def _work(self) -> R:
        self.client.begin_step()
        try:
            return self._fn()
        finally:
            self.client.end_step()

    def _until_good(self, launch: Callable[[], object]) -> None:
        client = self.client
        if client.num_under_way:
            raise ConfigError(
                f"{client.num_under_way} dispatches wait for their combine; a step needs their "
                f"slots: combine them before it runs"
            )
        patience: Patience | None = None
        client.refresh()
        while True:
            launch()
            report = client.read_step()
            if report.is_good:
                return
            patience = patience or client.begin_failover()
            patience.learn(report)


def check_repeatable(step: CapturedStep[R], kept: Mapping[str, Tensor]) -> None:
    """Run a step twice and see that the second run changes nothing.

    Args:
        step: The step; its inputs stay as they are.
        kept: What it writes beside its outputs, by name: KV caches, positions.

    Raises:
        ConfigError: A bit differs; names the tensor.
    """
    first = _snapshot(step.run(), kept)
    second = _snapshot(step.run(), kept)
    for name, bits in first.items():
        if not torch.equal(bits, second[name]):
            raise ConfigError(
                f"the step is not repeatable: {name} differs after a second run with the same "
                f"inputs; let nothing advance before run() has returned"
            )


def _snapshot(outputs: object, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the bits of all tensors, by name."""
    leaves, _ = pytree.tree_flatten_with_path(outputs)
    named = {f"output{pytree.keystr(path)}": leaf for path, leaf in leaves}
    tensors = {**named, **{f"kept[{name!r}]": tensor for name, tensor in kept.items()}}
    return {
        name: tensor.detach()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }
