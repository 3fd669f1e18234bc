"""What a compiler makes of dispatch and combine: the program's order, its errors, no leaks."""

from __future__ import annotations

import gc
import re
import shutil
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.compiled import assert_layer, assert_right, layer_of, remote, whole
from tests.served import D, E, K, batch, oracle, served
from torch_eaas.errors import ConfigError, ExpertUnavailable, InferenceOnlyError
from torch_eaas.remote_moe import RemoteMoE
from torch_eaas.remote_ops import address_of

OPS = torch.ops.torch_eaas


@pytest.fixture(autouse=True)
def _no_graph_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- order -----------------------------------------------------------------------------------------


def nodes_of(graphs: CompileCounterWithBackend) -> list[str]:
    return [str(n.target) for n in graphs.graphs[0].graph.nodes if n.op == "call_function"]


@torch.no_grad()
def test_the_shared_experts_work_lies_between_dispatch_and_combine_in_the_graph() -> None:
    with served(1) as cluster:
        compiled, graphs = whole(layer_of(cluster.client()))
        compiled(batch(4)[0])
        names = nodes_of(graphs)
    between = names[names.index("torch_eaas.dispatch") : names.index("torch_eaas.combine")]
    assert sum("linear" in name for name in between) == 2
    assert sum("silu" in name for name in between) == 1


@pytest.fixture
def inductor() -> Any:
    """Compile with Inductor, run; return the result and the calls in its code, in order.

    What is compiled here has products alone beside the ops: torch has them ready, so nothing waits
    for a C++ compiler.
    """
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    from torch._inductor.utils import run_and_get_code

    def run(module: Any, *inputs: Tensor) -> tuple[Any, list[str]]:
        # what an earlier run left on disk may be another version's
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            out, [code] = run_and_get_code(torch.compile(module, fullgraph=True), *inputs)
        found = re.findall(r"torch_eaas\.(\w+)\.default\(|extern_kernels\.(mm)\(", code)
        return out, [op or product for op, product in found]

    return run


INDUCTOR = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
"""Inductor's own imports are deprecated."""


@INDUCTOR
@torch.no_grad()
def test_the_shared_experts_work_lies_between_them_in_inductors_code(inductor: Any) -> None:
    x, ids, w = batch(4)
    shared = nn.Sequential(nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False))
    with served(1) as cluster:
        moe = RemoteMoE(lambda _: (ids, w), remote(cluster.client()), shared)
        out, calls = inductor(moe, x)
    assert calls == ["dispatch", "mm", "mm", "combine"]
    expected = oracle(1, x, ids, w) + shared(x).double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@INDUCTOR
@torch.no_grad()
def test_two_equal_dispatches_are_two_and_both_go_out_before_the_first_wait(inductor: Any) -> None:
    with served(1) as cluster:
        client = cluster.client()
        experts = remote(client)
        inputs = x, _, _ = batch(4)
        m = torch.randn(D, D)

        def twice(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            tickets = [experts.dispatch(*inputs) for _ in range(2)]
            return experts.combine(tickets[0], x @ m), experts.combine(tickets[1], x @ m.T)

        outs, calls = inductor(twice, *inputs)
        assert [each for each in calls if each != "mm"] == ["dispatch"] * 2 + ["combine"] * 2
        assert client.counters()["dispatches"] == 2
        for out, add in zip(outs, (x @ m, x @ m.T), strict=True):
            expected = oracle(1, *inputs) + add
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_more_pairs_in_a_graph_than_micro_batches_keep_their_order() -> None:
    with served(1) as cluster:
        # two dispatches before a combine would be one too many
        experts = remote(cluster.client(max_micro_batches=1))
        compiled, _ = whole(lambda x, ids, w: [experts(x + i, ids, w) for i in range(3)])
        x, ids, w = batch(4)
        for i, out in enumerate(compiled(x, ids, w)):
            assert_right(1, (x + i, ids, w), out)


@torch.no_grad()
def test_combine_holds_what_was_dispatched_so_nobody_reuses_its_memory_before() -> None:
    with served(1) as cluster:
        compiled, graphs = whole(remote(cluster.client()))
        compiled(*batch(4))
    [dispatch, combine] = [n for n in graphs.graphs[0].graph.nodes if "torch_eaas" in str(n.target)]
    assert combine.args == (dispatch.args[0], dispatch, *dispatch.args[1:], None)


# -- the ops by themselves -------------------------------------------------------------------------


def test_no_op_writes_into_an_argument_or_returns_one() -> None:
    for op in (OPS.dispatch, OPS.combine, OPS.refuse_backward):
        schema = op.default._schema
        assert not schema.is_mutable
        assert all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


@torch.no_grad()
def test_the_ops_keep_what_their_schemas_promise() -> None:
    with served(1) as cluster:
        address = address_of(cluster.client(), 1, E)
        checks = ("test_schema", "test_autograd_registration")
        torch.library.opcheck(OPS.dispatch, (address, *batch(4)), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_the_fakes_have_the_form_of_what_comes(dtype: torch.dtype) -> None:
    def form(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.dtype, tensor.stride(), tensor.device

    with served(1) as cluster:
        address = address_of(cluster.client(), 1, E)
        x, *routing = batch(4)
        # a transposed input and a transposed addend: the sum is contiguous all the same
        x = x.to(dtype).T.contiguous().T
        number = OPS.dispatch(address, x, *routing)
        out = OPS.combine(address, number, x, *routing, x)
        with torch._subclasses.FakeTensorMode() as mode:
            where, *fakes = (mode.from_tensor(t) for t in (address, x, *routing))
            fake_number = OPS.dispatch(where, *fakes)
            fake_out = OPS.combine(where, fake_number, *fakes, fakes[0])
    assert form(fake_number) == form(number)
    assert form(fake_out) == form(out)
    assert out.is_contiguous()


def test_an_address_of_a_client_that_is_gone_is_refused() -> None:
    class Gone:
        pass

    address = address_of(Gone(), 1, E)  # type: ignore[arg-type]  # it needs no client's methods
    gc.collect()
    with pytest.raises(ConfigError, match=r"client with handle \d+ no longer exists; keep it as"):
        OPS.dispatch(address, *batch(1))


# -- errors ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_an_error_in_a_graph_is_the_clients_and_leaves_no_dispatch_behind() -> None:
    with served(1) as cluster:
        client = cluster.client()
        experts = remote(client)

        def second_fails(x: Tensor, ids: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            first = experts.dispatch(x, ids, w)
            second = experts.dispatch(x, ids + 2 * E, w)
            return experts.combine(first), experts.combine(second)

        compiled, _ = whole(second_fails)
        inputs = batch(4)
        # more often than there are micro-batches
        for _ in range(6):
            with pytest.raises(ConfigError, match=r"layer 1, token 0: expert id \d+ is not within"):
                compiled(*inputs)
        out = experts(*inputs)
        assert_right(1, inputs, out)
        assert len(client._tickets) == 0


@torch.no_grad()
def test_a_shared_expert_that_raises_leaves_no_dispatch_behind() -> None:
    class Broken(nn.Module):
        def forward(self, x_TD: Tensor) -> Tensor:
            raise RuntimeError("planned")

    with served(1) as cluster:
        client = cluster.client()
        experts, inputs = remote(client), batch(4)
        moe = RemoteMoE(lambda _: inputs[1:], experts, Broken())
        for _ in range(6):
            with pytest.raises(RuntimeError, match="planned"):
                moe(inputs[0])
        out = experts(*inputs)
        assert_right(1, inputs, out)
        assert len(client._tickets) == 0


class ToOne(nn.Module):
    """A router to one expert."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((len(x_TD), K), 1), torch.ones(len(x_TD), K)


@torch.no_grad()
def test_a_graph_goes_on_after_a_layer_that_found_no_holder() -> None:
    with served(2) as cluster:
        # patient with the server that lives, not with the one that is gone
        client = cluster.client(
            recovery_timeout=timedelta(milliseconds=50), request_timeout=timedelta(seconds=20)
        )
        moe = layer_of(client)
        compiled, _ = whole(moe)
        x, _, _ = batch(16)
        assert_layer(moe, 1, x, compiled(x))
        cluster.servers[0].close()
        with pytest.raises(ExpertUnavailable, match="layer 1, expert"):
            compiled(x)
        assert len(client._tickets) == 0
        # the other server's experts are there as before
        moe.router = ToOne()
        assert_layer(moe, 1, x, compiled(x))


@torch.no_grad()
def test_a_closed_client_says_so_in_a_graph_too() -> None:
    with served(1) as cluster:
        client = cluster.client(name="alice")
        experts = remote(client)
        compiled, _ = whole(experts)
        inputs = batch(2)
        compiled(*inputs)
        client.close()
        for each in (experts, compiled):
            with pytest.raises(ConfigError, match="client alice is closed; open one"):
                each(*inputs)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants", ["x", "weights", "add"])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_backward_raises_where_a_gradient_would_come_back(wants: str, compiles: bool) -> None:
    with served(1) as cluster:
        experts = remote(cluster.client())
        x, ids, w = batch(3)
        add = torch.zeros_like(x)
        {"x": x, "weights": w, "add": add}[wants].requires_grad_()

        def forward(x: Tensor, ids: Tensor, w: Tensor, add: Tensor) -> Tensor:
            return experts.combine(experts.dispatch(x, ids, w), add=add)

        run = whole(forward)[0] if compiles else forward
        out = run(x, ids, w, add)
        assert_right(1, (x, ids, w), out.detach())
        with pytest.raises(InferenceOnlyError, match="remote experts run forward only"):
            out.sum().backward()


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_head_above_frozen_layers_can_be_trained(compiles: bool) -> None:
    with served(1) as cluster:
        model = nn.Sequential(layer_of(cluster.client()).requires_grad_(False), nn.Linear(D, 1))
        run = whole(model)[0] if compiles else model
        x, _, _ = batch(3)
        run(x).sum().backward()
        # the gradient of a sum of products is the sum of what they are taken of
        expected = model[0](x).sum(0)
        torch.testing.assert_close(model[1].weight.grad[0], expected, rtol=1e-5, atol=1e-5)
