"""Routers: which experts each token visits, and with what weight.

Both give the bits that transformers 5.24 gives, for fp32 and for bf16 inputs. Ties go where
``torch.topk`` puts them, which is not the lowest id; so a batch is routed once, on the client.

Shapes: ``T`` tokens, ``D`` hidden size, ``E`` experts, ``K`` experts per token, ``G`` groups.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from torch_eaas.config import check_at_least
from torch_eaas.errors import ConfigError


class SoftmaxTopKRouter(nn.Module):
    """Choose by softmax over all experts, as Mixtral and Qwen-MoE do.

    The logits are computed in the input's dtype, as there; softmax and all that follows is fp32.
    The gate's weight is stored in fp32, whatever dtype the model around it is cast to.

    Args:
        hidden_size: ``D``.
        num_experts: ``E``.
        top_k: ``K``, the experts that one token visits.
        norm_topk_prob: Scale the chosen weights to a sum of 1. Mixtral always does.
        round_weights: Round the weights to the input's dtype, as Qwen-MoE (not Mixtral) does.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        norm_topk_prob: bool = True,
        round_weights: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size, num_experts, top_k)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.round_weights = round_weights
        self.weight = _gate_weight(hidden_size, num_experts)

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids, int64 ``(T, K)``, and their weights, fp32 ``(T, K)``."""
        _check_tokens(x_TD, self.hidden_size)
        logits_TE = nn.functional.linear(x_TD, self.weight.to(x_TD.dtype))
        scores_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = scores_TE.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if self.round_weights:
            weights_TK = weights_TK.to(x_TD.dtype)
        return experts_TK, weights_TK.float()

    @override
    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        # torch leaves _apply untyped
        super()._apply(_keep_dtype(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, {self.num_experts}, top_k={self.top_k}, "
            f"norm_topk_prob={self.norm_topk_prob}, round_weights={self.round_weights}"
        )


class GroupLimitedRouter(nn.Module):
    """Choose within the best groups of experts, as DeepSeek-V3 does (``noaux_tc``).

    Scores are sigmoids of fp32 logits. A bias, learned to balance the load, takes part in the
    choice alone: first of the groups, each rated by the sum of its two best experts, then of the
    experts in them. The weights are the unbiased scores, scaled to a sum of
    ``routed_scaling_factor``: they are final, and nobody after the router scales them again.

    Gate weight and bias stay fp32, whatever dtype the model around them is cast to: in bf16 a
    bias near 7 would leave a handful of values for all experts.

    Args:
        hidden_size: ``D``.
        num_experts: ``E``.
        top_k: ``K``, the experts that one token visits.
        n_group: ``G``, the groups of equal size into which the experts fall, in order.
        topk_group: The groups from which one token's experts come.
        routed_scaling_factor: The sum of a token's weights; None is 1.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        routed_scaling_factor: float | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size, num_experts, top_k)
        _check_groups(num_experts, top_k, n_group, topk_group)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.n_group = n_group
        self.topk_group = topk_group
        factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
        if not 0 < factor < float("inf"):
            raise ConfigError(f"routed_scaling_factor must be above 0 and finite, got {factor}")
        self.routed_scaling_factor = factor
        self.weight = _gate_weight(hidden_size, num_experts)
        bias_E = torch.zeros(num_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias_E)

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids, int64 ``(T, K)``, and their weights, fp32 ``(T, K)``."""
        _check_tokens(x_TD, self.hidden_size)
        scores_TE = nn.functional.linear(x_TD.float(), self.weight.float()).sigmoid()
        choice_TE = self._within_best_groups(scores_TE + self.e_score_correction_bias)
        experts_TK = choice_TE.topk(self.top_k, dim=-1, sorted=False).indices
        weights_TK = scores_TE.gather(1, experts_TK)
        # all scores of a token may underflow to 0; fp32 holds 1e-20
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return experts_TK, weights_TK * self.routed_scaling_factor

    def _within_best_groups(self, choice_TE: Tensor) -> Tensor:
        choice_TGE = choice_TE.view(-1, self.n_group, self.num_experts // self.n_group)
        rating_TG = choice_TGE.topk(2, dim=-1).values.sum(dim=-1)
        best = rating_TG.topk(self.topk_group, dim=-1, sorted=False).indices
        out_TG = torch.ones_like(rating_TG, dtype=torch.bool).scatter(1, best, False)
        masked_TGE = choice_TGE.masked_fill(out_TG.unsqueeze(-1), float("-inf"))
        return masked_TGE.view(-1, self.num_experts)

    @override
    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        # torch leaves _apply untyped
        super()._apply(_keep_dtype(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, {self.num_experts}, top_k={self.top_k}, n_group={self.n_group}, "
            f"topk_group={self.topk_group}, routed_scaling_factor={self.routed_scaling_factor}"
        )


def _gate_weight(hidden_size: int, num_experts: int) -> nn.Parameter:
    weight_ED = torch.empty(num_experts, hidden_size, dtype=torch.float32)
    return nn.Parameter(nn.init.normal_(weight_ED, std=hidden_size**-0.5))


def _keep_dtype(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let ``fn`` move a tensor, but not change its dtype."""

    def move(tensor: Tensor) -> Tensor:
        moved: Tensor = fn(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return move


def _check_sizes(hidden_size: int, num_experts: int, top_k: int) -> None:
    check_at_least("hidden_size", hidden_size, 1)
    check_at_least("num_experts", num_experts, 1)
    check_at_least("top_k", top_k, 1)
    if top_k > num_experts:
        raise ConfigError(f"top_k must be at most num_experts={num_experts}, got {top_k}")


def _check_groups(num_experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    check_at_least("n_group", n_group, 1)
    check_at_least("topk_group", topk_group, 1)
    if num_experts % n_group:
        raise ConfigError(f"n_group must divide num_experts={num_experts}, got {n_group}")
    group_size = num_experts // n_group
    if group_size < 2:
        raise ConfigError(
            f"a group needs at least 2 experts, since its two best rate it; "
            f"num_experts={num_experts} in n_group={n_group} leaves {group_size}"
        )
    if topk_group > n_group:
        raise ConfigError(f"topk_group must be at most n_group={n_group}, got {topk_group}")
    if top_k > topk_group * group_size:
        raise ConfigError(
            f"top_k must be at most {topk_group * group_size}, the experts of "
            f"topk_group={topk_group} groups, got {top_k}"
        )


def _check_tokens(x_TD: Tensor, hidden_size: int) -> None:
    if x_TD.dim() != 2 or x_TD.shape[1] != hidden_size:
        raise ConfigError(f"a router takes tokens (T, {hidden_size}), got {tuple(x_TD.shape)}")
