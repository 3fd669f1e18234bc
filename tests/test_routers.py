"""Routers give the bits that transformers' own routers give, and keep their gate in fp32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from torch_eaas.errors import ConfigError
from torch_eaas.routers import GroupLimitedRouter, SoftmaxTopKRouter

D, E, K = 24, 16, 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOKENS = pytest.mark.parametrize("num_tokens", [0, 1, 63], ids="{}-tokens".format)
GATES = pytest.mark.parametrize("gate", ["random", "zeros", "underflow"])


def _mixtral(_: float | None) -> tuple[nn.Module, nn.Module]:
    config = MixtralConfig(hidden_size=D, num_local_experts=E, num_experts_per_tok=K)
    return SoftmaxTopKRouter(D, E, K), MixtralTopKRouter(config)


def _qwen(norm: bool) -> Callable[[float | None], tuple[nn.Module, nn.Module]]:
    def make(_: float | None) -> tuple[nn.Module, nn.Module]:
        config = Qwen3MoeConfig(
            hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=norm
        )
        ours = SoftmaxTopKRouter(D, E, K, norm_topk_prob=norm, round_weights=True)
        return ours, Qwen3MoeTopKRouter(config)

    return make


def _deepseek(factor: float | None, n_group: int = 4, topk_group: int = 2) -> tuple:
    config = DeepseekV3Config(
        hidden_size=D,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=1.0 if factor is None else factor,
    )
    ours = GroupLimitedRouter(
        D, E, K, n_group=n_group, topk_group=topk_group, routed_scaling_factor=factor
    )
    return ours, DeepseekV3TopkRouter(config)


ROUTERS = pytest.mark.parametrize(
    "make",
    [
        pytest.param(_mixtral, id="mixtral"),
        pytest.param(_qwen(True), id="qwen3-norm"),
        pytest.param(_qwen(False), id="qwen3-plain"),
        pytest.param(_deepseek, id="deepseek-4-groups"),
        pytest.param(lambda factor: _deepseek(factor, 1, 1), id="deepseek-1-group"),
    ],
)


def _fill(ours: nn.Module, theirs: nn.Module, gate: str, dtype: torch.dtype) -> Tensor:
    """Give both the same gate, and return the 63 tokens to route, ``(T, D)``."""
    generator = torch.Generator().manual_seed(7)
    x_TD = torch.randn(63, D, generator=generator).to(dtype)
    weight_ED = torch.randn(E, D, generator=generator) * 0.3
    if gate == "zeros":
        weight_ED.zero_()
    if gate == "underflow":
        # every logit is -200, where sigmoid and most of a softmax's terms are zero in fp32
        x_TD = torch.ones_like(x_TD)
        weight_ED.fill_(-200 / D)
    # what a checkpoint in that dtype could hold, so that both start from the same values
    weight_ED = weight_ED.to(dtype)
    with torch.no_grad():
        ours.weight.copy_(weight_ED)
        theirs.weight = nn.Parameter(weight_ED)
        if isinstance(ours, GroupLimitedRouter):
            bias_E = torch.randn(E, generator=generator) * 0.2 - 5
            ours.e_score_correction_bias.copy_(bias_E)
            theirs.e_score_correction_bias.copy_(bias_E)
    return x_TD


@ROUTERS
@GATES
@DTYPES
@TOKENS
@torch.no_grad()
def test_router_gives_the_bits_of_transformers(
    make: Callable, gate: str, dtype: torch.dtype, num_tokens: int
) -> None:
    ours, theirs = make(2.5)
    x_TD = _fill(ours, theirs, gate, dtype)[:num_tokens]
    experts_TK, weights_TK = ours(x_TD)
    _, expected_weights_TK, expected_experts_TK = theirs(x_TD)
    assert (experts_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
    assert experts_TK.shape == weights_TK.shape == (num_tokens, K)
    assert torch.equal(experts_TK, expected_experts_TK)
    assert torch.equal(weights_TK, expected_weights_TK.float())
    assert weights_TK.isfinite().all()


@torch.no_grad()
def test_routed_scaling_factor_is_applied_exactly_once() -> None:
    ours, theirs = _deepseek(2.5)
    x_TD = _fill(ours, theirs, "random", torch.float32)
    _, weights_TK = ours(x_TD)
    torch.testing.assert_close(weights_TK.sum(dim=-1), torch.full((63,), 2.5))


@torch.no_grad()
def test_no_routed_scaling_factor_is_a_factor_of_one() -> None:
    ours, theirs = _deepseek(None)
    x_TD = _fill(ours, theirs, "random", torch.float32)
    assert torch.equal(ours(x_TD)[1], theirs(x_TD)[1])


@torch.no_grad()
def test_scores_that_all_underflow_weigh_nothing_instead_of_nan() -> None:
    ours, theirs = _deepseek(2.5)
    x_TD = _fill(ours, theirs, "underflow", torch.float32)
    assert torch.equal(ours(x_TD)[1], torch.zeros(63, K))


@torch.no_grad()
def test_experts_outside_the_best_groups_are_never_chosen_even_at_negative_biases() -> None:
    ours, _ = _deepseek(1.0)
    ours.weight.zero_()
    # groups of 4; the two best of groups 1 and 3 add up to more
    bias_E = torch.tensor([-9.0, -9, -9, -9, -5, -5, -7, -7] * 2)
    bias_E[0] = -4.5  # the best single expert, in a group that is out
    ours.e_score_correction_bias.copy_(bias_E)
    experts_TK, _ = ours(torch.ones(1, D))
    assert sorted(experts_TK[0].tolist()) == [4, 5, 12, 13]


CASTS = {
    "to-bf16": lambda module: module.to(torch.bfloat16),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to-device-and-dtype": lambda module: module.to("cpu", torch.float16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize("make", [_mixtral, _deepseek], ids=["softmax", "group-limited"])
def test_casting_the_model_leaves_gate_and_bias_in_fp32(make: Callable, cast: Callable) -> None:
    router, theirs = make(2.5)
    _fill(router, theirs, "random", torch.float32)
    model = nn.Sequential(nn.Linear(2, 2), router)
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    cast(model)
    assert model[0].weight.dtype != torch.float32
    for name, tensor in router.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("make", [_mixtral, _deepseek], ids=["softmax", "group-limited"])
def test_moving_and_casting_at_once_moves_the_gate(make: Callable) -> None:
    router, _ = make(2.5)
    router.to("meta", torch.bfloat16)
    assert {(t.device.type, t.dtype) for t in router.state_dict().values()} == {
        ("meta", torch.float32)
    }


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SoftmaxTopKRouter(0, 4, 2), "hidden_size must be an integer of at least 1, got 0"),
        (lambda: SoftmaxTopKRouter(8, 0, 2), "num_experts must be .* at least 1, got 0"),
        (lambda: SoftmaxTopKRouter(8, 4, 0), "top_k must be .* at least 1, got 0"),
        (lambda: SoftmaxTopKRouter(8, 4, 5), "top_k must be at most num_experts=4, got 5"),
        (lambda: GroupLimitedRouter(8, 4, 5), "top_k must be at most num_experts=4, got 5"),
        (lambda: GroupLimitedRouter(8, 6, 2, n_group=4), "n_group must divide num_experts=6, got"),
        (lambda: GroupLimitedRouter(8, 6, 2, n_group=0), "n_group must be .* at least 1, got 0"),
        (lambda: GroupLimitedRouter(8, 4, 2, n_group=4), "needs at least 2 experts.* leaves 1"),
        (
            lambda: GroupLimitedRouter(8, 4, 2, n_group=2, topk_group=3),
            "topk_group must be at most n_group=2, got 3",
        ),
        (lambda: GroupLimitedRouter(8, 4, 2, topk_group=0), "topk_group must be .* got 0"),
        (
            lambda: GroupLimitedRouter(8, 8, 5, n_group=2, topk_group=1),
            "top_k must be at most 4, the experts of topk_group=1 groups, got 5",
        ),
        (
            lambda: GroupLimitedRouter(8, 4, 2, routed_scaling_factor=0.0),
            "routed_scaling_factor must be above 0 and finite, got 0.0",
        ),
        (lambda: SoftmaxTopKRouter(8, 4, 2)(torch.ones(1, 2, 8)), r"\(T, 8\), got \(1, 2, 8\)"),
        (lambda: GroupLimitedRouter(8, 4, 2)(torch.ones(3, 7)), r"\(T, 8\), got \(3, 7\)"),
    ],
    ids=[
        "hidden-size",
        "no-experts",
        "no-top-k",
        "top-k-above-experts",
        "top-k-above-experts-in-groups",
        "uneven-groups",
        "no-groups",
        "groups-of-one",
        "more-chosen-groups-than-groups",
        "no-chosen-groups",
        "top-k-above-chosen-groups",
        "factor-zero",
        "three-dimensions",
        "other-width",
    ],
)
def test_bad_sizes_are_refused_by_name(build: Callable, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
