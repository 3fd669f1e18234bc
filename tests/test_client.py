"""The client: answers, splitting, what it refuses."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from tests.served import LAYERS, D, E, K, batch, call, oracle, served
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.config import ClientConfig
from torch_eaas.errors import AnomalyError, ConfigError, ExpertUnavailable

MS = timedelta(milliseconds=1)
TRANSPORTS = [LoopbackTransport, SharedMemoryTransport]


def assert_right(layer: int, batch_: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), oracle(layer, *batch_), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda t: t.__name__)
@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_every_batch_size_gives_the_oracles_sum(transport: type[Transport], combine: str) -> None:
    with served(3, copies=2, transport=transport()) as cluster:
        client = cluster.client(combine=combine)
        for num_tokens in (0, 1, 7, 15, 16, 17, 63, 160):
            x, ids, w = batch(num_tokens, num_tokens, low=-1)
            for layer in LAYERS:
                out = call(client, layer, x, ids, w)
                assert out.shape == (num_tokens, D)
                assert_right(layer, (x, ids, w), out)


def test_the_number_of_experts_means_no_expert_as_minus_one_does() -> None:
    with served(1) as cluster:
        client = cluster.client()
        x, ids, w = batch(5)
        ids[2] = torch.tensor([E, 3])
        ids[3] = torch.tensor([-1, E])
        out = call(client, 1, x, ids, w)
        assert_right(1, (x, ids, w), out)
        assert out[3].count_nonzero() == 0


def test_a_repeated_expert_counts_twice() -> None:
    with served(2) as cluster:
        x, ids, w = batch(3)
        ids[:] = 5
        assert_right(1, (x, ids, w), call(cluster.client(), 1, x, ids, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_outputs_dtype_is_the_inputs_and_layout_does_not_matter(dtype: torch.dtype) -> None:
    with served(2) as cluster:
        x, ids, w = batch(9)
        strided = torch.empty(D, 9, dtype=dtype).t().copy_(x)
        out = call(cluster.client(), 1, strided, ids, w.to(dtype))
        assert out.dtype == dtype
        expected = oracle(1, strided.float(), ids, w.to(dtype).float())
        bound = max(1e-5, torch.finfo(dtype).eps)
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)


def test_zero_tokens_and_tokens_without_experts_make_no_request() -> None:
    with served(1) as cluster:
        client = cluster.client()
        x, ids, w = batch(4)
        call(client, 1, x[:0], ids[:0], w[:0])
        assert call(client, 1, x, torch.full_like(ids, -1), w).count_nonzero() == 0
        assert client.counters().get("requests", 0) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, i, w: (x[:, 1:], i, w), r"layer 1: hidden states must be \(T, 24\)"),
        (lambda x, i, w: (x.double(), i, w), r"in fp32, bf16 or fp16, got .* torch.float64"),
        (lambda x, i, w: (x, i[1:], w), r"ids and weights must be \(4, 2\), got \(3, 2\)"),
        (lambda x, i, w: (x, i, w[:, :1]), r"ids and weights must be \(4, 2\)"),
        (lambda x, i, w: (x, i.clone().fill_(9), w), r"layer 1, token 0: expert id 9 is not"),
        (
            lambda x, i, w: (x, i.clone().fill_(-2), w),
            r"token 0: expert id -2 is not within 0 to 7",
        ),
        (
            lambda x, i, w: (x.to("meta"), i, w),
            r"layer 1: hidden states, ids and weights must be on the CPU or on one CUDA device, "
            r"got cpu, cpu, meta",
        ),
    ],
    ids=["hidden", "dtype", "ids", "weights", "id-high", "id-low", "device"],
)
def test_bad_input_is_refused_before_anything_is_sent(change: object, message: str) -> None:
    with served(1) as cluster:
        client = cluster.client()
        x, ids, w = change(*batch(4))  # type: ignore[operator]
        with pytest.raises(ConfigError, match=message):
            client.dispatch(1, x, ids, w, num_experts=E)
        assert client.counters() == {}
        assert_right(1, batch(4), call(client, 1, *batch(4)))


def test_dispatches_may_be_combined_in_any_order_each_once() -> None:
    with served(2) as cluster:
        client = cluster.client()
        first = client.dispatch(1, *batch(3, 1), num_experts=E)
        second = client.dispatch(3, *batch(5, 2), num_experts=E)
        assert (first.dtype, first.shape) == (torch.int64, (1,))
        assert_right(3, batch(5, 2), client.combine(second))
        assert_right(1, batch(3, 1), client.combine(first))
        with pytest.raises(ConfigError, match="is not under way; combine takes each one once"):
            client.combine(first)


def test_one_dispatch_too_many_is_refused() -> None:
    with served(1) as cluster:
        client = cluster.client(max_micro_batches=2)
        tickets = [client.dispatch(1, *batch(3), num_experts=E) for _ in range(2)]
        with pytest.raises(ConfigError, match=r"raise max_micro_batches \(now 2\)"):
            client.dispatch(1, *batch(3), num_experts=E)
        for ticket in tickets:
            client.combine(ticket)


def test_a_split_batch_leaves_a_slot_for_the_other_micro_batches() -> None:
    with served(1) as cluster:
        client = cluster.client(max_micro_batches=3)
        cluster.experts[0].hold()
        big = client.dispatch(1, *batch(160, 1), num_experts=E)
        small = client.dispatch(1, *batch(3, 2), num_experts=E)
        requests = client.counters()["requests"]
        assert requests == 3  # two of the big batch, one of the small one
        cluster.experts[0].go.set()
        assert_right(1, batch(3, 2), client.combine(small))
        assert_right(1, batch(160, 1), client.combine(big))


def test_exact_mode_gives_equal_bits_for_every_placement_and_batch() -> None:
    x, ids, w = batch(37, low=-1)
    results = []
    for num_servers, copies in ((1, 1), (2, 1), (3, 2), (3, 3)):
        with served(num_servers, copies) as cluster:
            client = cluster.client(combine="exact")
            results.append(call(client, 1, x, ids, w))
            one_by_one = [
                call(client, 1, x[t : t + 1], ids[t : t + 1], w[t : t + 1]) for t in range(37)
            ]
            results.append(torch.cat(one_by_one))
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_partial_mode_gives_equal_bits_when_nothing_changes() -> None:
    with served(3, copies=2) as cluster:
        # a hedge on a busy machine would be a change
        client = cluster.client(hedge_after=timedelta(seconds=30))
        # one request a server: whether two of them share a batch is a matter of time
        outs = [call(client, 1, *batch(16)) for _ in range(5)]
        assert all(torch.equal(outs[0], out) for out in outs)


def test_the_added_tensor_enters_the_sum_in_fp32_before_the_cast() -> None:
    with served(1) as cluster:
        client = cluster.client()
        x, ids, w = batch(4)
        x = x.bfloat16()
        add = torch.randn(4, D)
        out = client.combine(client.dispatch(1, x, ids, w, num_experts=E), add=add)
        expected = (oracle(1, x.float(), ids, w) + add).bfloat16()
        torch.testing.assert_close(out, expected, rtol=0.008, atol=1e-6)


def test_a_bfloat16_wire_and_reply_cost_only_rounding() -> None:
    with served(2) as cluster:
        x, ids, w = batch(33)
        client = cluster.client(wire_dtype="bf16", reply_dtype="bf16")
        out = call(client, 1, x, ids, w)
        expected = oracle(1, x.bfloat16().float(), ids, w)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


# -- numbers in bad shape ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("num_tokens", [3, 63])
def test_a_bad_number_stays_in_its_row(bad: float, num_tokens: int) -> None:
    with served(2) as cluster:
        x_TD, ids_TK, weights_TK = batch(num_tokens)
        broken_TD = x_TD.clone()
        broken_TD[1, 5] = bad
        out_TD = call(cluster.client(), 1, broken_TD, ids_TK, weights_TK)
        assert not out_TD[1].isfinite().all()
        others = [token for token in range(num_tokens) if token != 1]
        wanted_TD = oracle(1, x_TD, ids_TK, weights_TK)
        torch.testing.assert_close(out_TD[others].double(), wanted_TD[others], rtol=1e-5, atol=1e-5)


def test_anomalies_are_named_by_layer_and_token_where_they_are_looked_for() -> None:
    with served(1) as cluster:
        client = cluster.client(detect_anomalies=True)
        x_TD, ids_TK, weights_TK = batch(8)
        assert_right(3, batch(8), call(client, 3, *batch(8)))
        x_TD[4, 0] = float("nan")
        with pytest.raises(AnomalyError, match=r"layer 3, token 4: a hidden state is not finite"):
            call(client, 3, x_TD, ids_TK, weights_TK)
        weights_TK[6] = float("inf")
        message = r"layer 3, token 6: the experts' sum is not finite \(1 of 8 tokens\)"
        with pytest.raises(AnomalyError, match=message):
            call(client, 3, batch(8)[0], ids_TK, weights_TK)
        assert_right(3, batch(8), call(client, 3, *batch(8)))


def test_an_idle_client_delays_nobody() -> None:
    with served(2) as cluster:
        busy, idle = cluster.client(name="busy"), cluster.client(name="idle")
        ticket = idle.dispatch(1, *batch(4), num_experts=E)  # dispatched and not combined
        for i in range(200):
            call(busy, 1, *batch(4, i))
        assert_right(1, batch(4), idle.combine(ticket))
        assert busy.counters().get("hedges", 0) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"either servers=\[address, ...\] or monitor=url"),
        ({"servers": ["loopback:x"], "monitor": "http://127.0.0.1:1"}, "either servers"),
    ],
    ids=["neither", "both"],
)
def test_a_client_is_told_of_servers_in_one_way(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Client(ClientConfig(hidden_size=D, top_k=K), transport=LoopbackTransport(), **options)  # type: ignore[arg-type]


def test_waiting_for_servers_that_are_not_there_names_what_is_missing() -> None:
    with (
        Client(
            ClientConfig(hidden_size=D, top_k=K),
            servers=["loopback:nobody"],
            transport=LoopbackTransport(),
        ) as client,
        pytest.raises(ExpertUnavailable, match=r"layer 1, expert 0 .*no server is known yet"),
    ):
        client.wait_ready(LAYERS, E, timeout=50 * MS)
