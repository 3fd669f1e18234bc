"""Which holder serves which expert of a batch: the one with the fewest experts so far."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops.choose_replicas import choose_replicas
from torch_eaas.placement import Placement, ServerInfo, share
from torch_eaas.routing import LayerRoutes

pytestmark = pytest.mark.usefixtures("implementation", "poisoned_empty")


def ints(values: list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_docstrings_example_holds() -> None:
    holders_EH = ints([[5, 6], [5, 6], [5, -1]])
    assert choose_replicas(ints([[0, 1], [2, 1]]), holders_EH, 7).tolist() == [5, 6, 5]
    assert choose_replicas(ints([[1, 2], [-1, 1]]), holders_EH, 7).tolist() == [5, 5, 5]


def test_an_expert_without_a_holder_has_no_pair_and_ids_of_none_are_not_looked_at() -> None:
    holders_EH = ints([[-1, -1, -1], [3, 2, 1], [3, 1, -1]])
    ids_TK = ints([[0, -1, 2**31 - 1], [1, 2, 3]])
    assert choose_replicas(ids_TK, holders_EH, 4).tolist() == [-1, 3, 1]


def test_a_batch_of_no_tokens_leaves_each_expert_with_its_first_holder() -> None:
    assert choose_replicas(ints([[]]), ints([[1, 0], [1, 0]]), 2).tolist() == [1, 1]


def routes(num_experts: int, num_servers: int, copies: int) -> LayerRoutes:
    servers = tuple(
        ServerInfo(
            name=f"s{i}",
            instance=i + 1,
            address="",
            holdings=share((0,), num_experts, i, num_servers, copies=copies),
        )
        for i in range(num_servers)
    )
    names = [server.name for server in servers]
    placement = Placement(servers=servers)
    return LayerRoutes(placement, 0, num_experts, open_servers=names, suspects=(), salt=77)


@pytest.mark.parametrize(("num_tokens", "copies"), [(1, 2), (4, 3), (9, 2)], ids=str)
def test_every_expert_of_the_batch_goes_where_a_host_driven_client_would_send_it(
    num_tokens: int, copies: int
) -> None:
    num_experts, num_servers = 256, 7
    host = routes(num_experts, num_servers, copies)
    holders_EH = ints([list(holders) for holders in host._holders])
    made = torch.Generator().manual_seed(num_tokens)
    rows = [torch.randperm(num_experts, generator=made)[:8] for _ in range(num_tokens)]
    ids_TK = torch.stack(rows)
    pairs_E = choose_replicas(ids_TK.int(), holders_EH, num_servers)
    assert pairs_E[ids_TK].tolist() == host.choose(ids_TK.numpy()).tolist()
    # the others have a holder too, for the batches to come
    assert all(pair in host._holders[expert] for expert, pair in enumerate(pairs_E.tolist()))


def test_holders_of_no_expert_are_refused() -> None:
    message = r"at least one holder of 1 to 1024 experts, got shape \({}\)"
    for shape in ((0, 2), (1025, 2), (4, 0)):
        holders_EH = torch.zeros(shape, dtype=torch.int32)
        with pytest.raises(ConfigError, match=message.format(", ".join(map(str, shape)))):
            choose_replicas(ints([[0]]), holders_EH, 1)
