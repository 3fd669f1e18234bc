"""A whole step of the client's stages, repeatable: a dead server costs one wait, not one a layer.

The model is a stub: each layer keeps what it sees at the step's own position, as attention keeps
its KV, and adds what two servers answer. A step is a fixed list of launches that reads all that may
change from tables; the host changes the tables between two runs of it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.device_ends import DeviceServer, Windows
from tests.ops.windowed import Pair, client_of, numbers
from torch_eaas.ops.add_replies import add_replies
from torch_eaas.ops.reference_client import Outcome
from torch_eaas.ops.share_tokens import share_tokens
from torch_eaas.ops.signal import Waited, wait_free, wait_replies
from torch_eaas.ops.write_requests import write_requests
from torch_eaas.protocol.layout import PairSpec

T, D, K, E = 3, 4, 2, 4
SPEC = PairSpec(hidden_size=D, top_k=K, slots=2, max_tokens=T)
LOOKS = 3
LONG_US = 10**8

int32 = torch.int32


class Cluster:
    """Two servers that both hold every expert; a dead one is never stepped again."""

    def __init__(self, num_layers: int) -> None:
        self.pairs = [Pair(instance=9, spec=SPEC) for _ in range(2)]
        # halves, quarters, ...: sums of them are exact however they are grouped
        scales = {(layer, e): 2.0 ** -(e + 1) for layer in range(num_layers) for e in range(E)}
        self.servers = [DeviceServer(SPEC, scales, E) for _ in range(2)]
        for server, pair in zip(self.servers, self.pairs, strict=True):
            server.open(0, Windows(pair.requests, pair.replies, pair.instance, pair.epoch))
        self.alive = [True, True]

    def serve(self) -> None:
        for server, is_alive in zip(self.servers, self.alive, strict=True):
            if is_alive:
                server.step(lambda: 0)


class Step:
    """The launches of one step and the tables they read."""

    def __init__(self, cluster: Cluster, num_layers: int) -> None:
        self._cluster = cluster
        self.num_layers = num_layers
        self.tables = client_of(list(cluster.pairs), [0, 0])
        self.pairs_LE = torch.tensor([[0, 0, 1, 1]] * num_layers, dtype=int32)
        self.abort, self._gate = numbers(0), numbers(0)
        self._arrivals_P = numbers(0, 0, dtype=int32)
        self.kept = torch.zeros(num_layers, T, D)
        self.outcomes_PO = torch.zeros(2, len(Outcome), dtype=torch.int64)
        self.outcomes: list[list[list[int]]] = []

    def run(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Run every launch, whatever becomes of it; what counts is the abort word at the end."""
        for word in (self.abort, self._gate, self.outcomes_PO):
            word.zero_()
        self.outcomes = []
        for layer in range(self.num_layers):
            self.kept[layer] = x_TD
            x_TD = self._moe(layer, x_TD, ids_TK, weights_TK)
        return x_TD

    def _moe(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        gate, abort, tables = self._gate, self.abort, self.tables
        pairs_E = self.pairs_LE[layer]
        shares, places_PT = share_tokens(
            ids_TK, weights_TK, pairs_E, abort, num_pairs=2, layer=layer
        )
        waits = (tables, shares.counts_P, gate, self._arrivals_P, abort, self.outcomes_PO)
        wait_free(*waits, layer=layer, timeout_us=LONG_US, looks=LOOKS)
        write_requests(
            tables,
            shares,
            x_TD,
            gate,
            self._arrivals_P,
            layer=layer,
            version=numbers(1),
            budget_us=LONG_US,
        )
        self._cluster.serve()
        wait_replies(*waits, layer=layer, timeout_us=LONG_US, looks=LOOKS)
        self.outcomes.append(self.outcomes_PO[:, :2].tolist())
        return add_replies(tables, places_PT, gate, x_TD, reply_dtype=torch.float32)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    x_TD = torch.arange(1.0, T * D + 1).view(T, D)
    # the last row is padding: a smaller batch than was captured
    ids_TK = torch.tensor([[0, 2], [3, 1], [-1, -1]], dtype=int32)
    # so small that sixty layers of them stay exact sums of powers of two
    return x_TD, ids_TK, torch.full((T, K), 2.0**-6)


def num_layers_of(name: str) -> int:
    # the interpreter takes a fifth of a second a layer
    return 60 if name == "twins" else 5


def test_a_server_that_dies_at_layer_3_costs_one_wait_and_the_replayed_step_is_the_undisturbed_one(
    implementation: str,
) -> None:
    num_layers = num_layers_of(implementation)
    undisturbed = Step(Cluster(num_layers), num_layers)
    expected_TD = undisturbed.run(*inputs())
    layers = range(num_layers)
    assert undisturbed.outcomes == [[[Waited.ARRIVED, layer]] * 2 for layer in layers]

    cluster = Cluster(num_layers)
    step = Step(cluster, num_layers)
    # it dies while it has layer 3's request
    serve, served = cluster.serve, []

    def serve_until_layer_3() -> None:
        served.append(len(served))
        cluster.alive[1] = len(served) <= 3
        serve()

    cluster.serve = serve_until_layer_3  # type: ignore[method-assign]  # the planned fault
    step.run(*inputs())
    assert step.abort.tolist() == [1]
    assert step.outcomes[:3] == undisturbed.outcomes[:3]
    # and so it stays: after the step the host reads who failed, how, and where
    assert step.outcomes[3:] == [[[Waited.ARRIVED, 3], [Waited.TIMED_OUT, 3]]] * (num_layers - 3)
    # four requests went out, and not one behind the layer that failed
    assert (step.tables.words_PS >> 8)[:, 0].tolist() == [4, 4]

    # the host gives the dead one's experts to the other, and runs the same step again
    step.pairs_LE.fill_(0)
    again_TD = step.run(*inputs())
    assert step.abort.tolist() == [0]
    assert step.outcomes == [[[Waited.ARRIVED, layer], [Waited.NOTHING, 0]] for layer in layers]
    assert torch.equal(again_TD, expected_TD)
    assert torch.equal(step.kept, undisturbed.kept)


@pytest.mark.usefixtures("implementation")
def test_a_server_that_comes_back_in_a_new_window_is_used_without_another_launch() -> None:
    cluster = Cluster(2)
    step = Step(cluster, 2)
    expected_TD = step.run(*inputs())
    # a new life: another pair of windows, a higher epoch, words from the beginning
    pair = Pair(instance=9, epoch=2, spec=SPEC)
    cluster.servers[1].open(0, Windows(pair.requests, pair.replies, 9, 2))
    step.tables.pairs_PC[1] = pair.row
    step.tables.words_PS[1] = 0
    before = bytes(cluster.pairs[1].requests)
    assert torch.equal(step.run(*inputs()), expected_TD)
    assert bytes(cluster.pairs[1].requests) == before
    assert step.tables.words_PS[:, 0].tolist() == [0x401, 0x201]
