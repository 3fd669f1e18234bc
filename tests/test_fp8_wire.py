"""Hidden states in fp8 on the wire: what arrives, how far it is off, and what stays as it was.

Shape legend: T tokens, K experts per token, D hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.served import E as SMALL_E
from tests.served import batch as small_batch
from tests.served import oracle as small_oracle
from tests.test_server import ByHand
from torch_eaas.client import Client
from torch_eaas.comm.loopback import LoopbackTransport
from torch_eaas.comm.shared_memory import SharedMemoryTransport
from torch_eaas.comm.transport import Transport
from torch_eaas.testing import LocalCluster, random_experts

D, I, E, K = 300, 64, 8, 2
"""Three blocks of numbers share a scale each, the last one of 44."""

WEIGHTS = random_experts(D, I, layers=[0], num_experts=E)
INPUTS = [torch.float32, torch.bfloat16, torch.float16]


def kept(x_TD: Tensor) -> Tensor:
    """Return what fp8 keeps of numbers: e4m3 times a scale for each 128 of a token's."""
    out_TD = torch.empty(x_TD.shape)
    for part_Tn, to_Tn in zip(x_TD.float().split(128, 1), out_TD.split(128, 1), strict=True):
        for part_n, to_n in zip(part_Tn, to_Tn, strict=True):
            largest = part_n.abs().max()
            scale = largest / 448 if largest else torch.tensor(1.0)
            to_n.copy_((part_n / scale).to(torch.float8_e4m3fn).float() * scale)
    return out_TD


def batch(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(num_tokens)
    # tokens and blocks of very different sizes: each has a scale of its own
    sizes = torch.rand(num_tokens, 1, generator=made) * 3 - 1.5
    x_TD = torch.randn(num_tokens, D, generator=made) * 10**sizes
    x_TD[:, 128:256] *= 100
    return (
        x_TD.to(dtype),
        torch.randint(-1, E, (num_tokens, K), generator=made),
        torch.rand(num_tokens, K, generator=made),
    )


def call(client: Client, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return client.combine(client.dispatch(0, x, ids, w, num_experts=E))


@pytest.mark.parametrize("transport", [LoopbackTransport, SharedMemoryTransport])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_layer_gives_the_bits_that_it_gives_for_what_fp8_keeps(
    transport: type[Transport], num_servers: int
) -> None:
    with LocalCluster(WEIGHTS, servers=num_servers, transport=transport()) as cluster:
        options: Any = {"top_k": K, "max_tokens": 16, "combine": "exact"}
        plain = cluster.client(**options)
        fp8 = cluster.client(**options, wire_dtype="fp8", name="fp8")
        for num_tokens in (0, 1, 7, 63):
            x, ids, w = batch(num_tokens)
            assert torch.equal(call(fp8, x, ids, w), call(plain, kept(x), ids, w))


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_an_input_of_any_dtype_is_quantised_from_its_own_numbers(dtype: torch.dtype) -> None:
    with LocalCluster(WEIGHTS, servers=1) as cluster:
        plain = cluster.client(top_k=K)
        fp8 = cluster.client(top_k=K, wire_dtype="fp8", name="fp8")
        x, ids, w = batch(9, dtype)
        strided = torch.empty(D, 9, dtype=dtype).t().copy_(x).requires_grad_()
        out = call(fp8, strided, ids, w)
        assert out.dtype == dtype
        assert torch.equal(out, call(plain, kept(x), ids, w).to(dtype))


def test_the_error_is_what_four_significant_bits_cost() -> None:
    with LocalCluster(WEIGHTS, servers=2) as cluster:
        x, ids, w = batch(63)
        wanted = call(cluster.client(top_k=K), x, ids.clamp(0), w)
        fp8 = cluster.client(top_k=K, wire_dtype="fp8", name="fp8")
        error = call(fp8, x, ids.clamp(0), w) - wanted
    # a number is off by at most 1/16 of itself, or by 2**-10 scales, 2**-10 / 448 of the largest
    bound = torch.maximum(x.abs() / 16, x.abs().max(1, keepdim=True).values / 448 / 1024)
    assert ((kept(x) - x).abs() <= bound * (1 + 1e-6)).all()
    # spread evenly that is 1 / (16 sqrt(3)) = 3.6 % at most; gate and up carry it, each its own
    relative_T = error.norm(dim=1) / wanted.norm(dim=1)
    assert relative_T.square().mean().sqrt() < 2 / (16 * 3**0.5)
    # and it is no less than half of it: nothing went around the wire
    assert relative_T.square().mean().sqrt() > 0.5 / (16 * 3**0.5)


def test_zeros_stay_zeros_and_the_largest_numbers_stay_finite() -> None:
    with LocalCluster(WEIGHTS, servers=1) as cluster:
        fp8 = cluster.client(top_k=K, wire_dtype="fp8", combine="exact")
        x, ids, w = batch(4)
        ids = ids.clamp(0)
        x[1] = 0
        x[2] = torch.finfo(torch.float32).max * torch.linspace(-1, 1, D)
        out = call(fp8, x, ids, w)
        assert not out[1].any()
        assert kept(x[2:3]).isfinite().all()
        others = [0, 3]
        assert torch.equal(out[others], call(fp8, x[others], ids[others], w[others]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_bad_number_stays_in_its_row(bad: float) -> None:
    with LocalCluster(WEIGHTS, servers=2) as cluster:
        fp8 = cluster.client(top_k=K, wire_dtype="fp8", combine="exact")
        x, ids, w = batch(5)
        ids = ids.clamp(0)
        wanted = call(fp8, x, ids, w)
        x[1, 7] = bad
        out = call(fp8, x, ids, w)
        assert out[1].isnan().all()
        others = [0, 2, 3, 4]
        assert torch.equal(out[others], wanted[others])


def test_clients_of_all_wire_dtypes_share_a_batch() -> None:
    hand = ByHand()
    clients = {name: hand.client(name=name, wire_dtype=name) for name in ("fp8", "bf16", "fp32")}
    inputs = {name: small_batch(3 + i, i) for i, name in enumerate(clients)}
    tickets = {
        name: client.dispatch(1, *inputs[name], num_experts=SMALL_E)
        for name, client in clients.items()
    }
    assert hand.server.step() == 3
    assert hand.experts.batches == [3 + 4 + 5]
    for name, client in clients.items():
        x, ids, w = inputs[name]
        x = {"fp8": kept(x), "bf16": x.bfloat16().float(), "fp32": x}[name]
        out = client.combine(tickets[name])
        torch.testing.assert_close(out.double(), small_oracle(1, x, ids, w), rtol=1e-5, atol=1e-5)
        client.close()
    hand.server.close()
