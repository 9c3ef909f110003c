"""A model's layers as one rank runs them: local weights, and the exchange that makes the result whole.

transformers cuts the weights while it loads them, and would wrap every layer in its own exchange. Its linear layers
are replaced by these so that products are packed as on one rank (see `linear`) and sums have one order (see `group`).
Experts keep transformers' own dispatch, by which a rank runs its experts on all tokens; only the sum is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.expert_parallel import AllReduceEP, EPImplementationInterface

from farfill.engine.torch.ranks.group import RankGroup

EXPERT_DISPATCH = "farfill"


class SummedLinear(nn.Module):
    """y = Σ over ranks x_r W_rᵀ + b: each rank has some of the inputs."""

    def __init__(self, group: RankGroup, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.part = linear_of(weight, None)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., inputs of this rank]."""
        y = self._group.total(self.part(x))
        return y if self.bias is None else y + self.bias


class GatheredLinear(nn.Module):
    """y = x Wᵀ + b with each rank computing some of the outputs; all ranks get all of them."""

    def __init__(
        self, group: RankGroup, weight: torch.Tensor, bias: torch.Tensor | None, widths: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.part = linear_of(weight, bias)
        # Its shape is asked for, and nothing else.
        self.weight = torch.empty((sum(widths), weight.shape[1]), dtype=weight.dtype, device="meta")
        self._group = group
        self._widths = widths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., all inputs]."""
        return self._group.concatenated(self.part(x), self._widths)


class ExpertLoad:
    """How many (token, expert) pairs were routed to each expert, all layers together. The same on every rank."""

    def __init__(self) -> None:
        self.routed = torch.zeros(0, dtype=torch.long)

    def count(self, experts: int, chosen: torch.Tensor) -> None:
        """`chosen` [tokens, k] are expert numbers, or `experts` for none."""
        if not self.routed.numel():
            self.routed = torch.zeros(experts, dtype=torch.long)
        self.routed += torch.bincount(chosen.reshape(-1), minlength=experts)[:experts].cpu()


class ExpertDispatch(AllReduceEP):
    """A rank's own experts on all tokens that were routed to them, summed over ranks."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any, *, group: RankGroup, load: ExpertLoad) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._local = int(experts.num_experts)
        self._group = group
        self._load = load

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, dim], with [tokens, k] expert numbers and weights."""
        local = self._local
        self._load.count(local * self._group.size, top_k_index)
        elsewhere = (top_k_index // local) != self._group.rank
        index = torch.where(elsewhere, local, top_k_index % local)
        output = self.experts_forward(hidden_states, index, top_k_weights.masked_fill(elsewhere, 0.0))
        return self._group.total(output)


def register(group: RankGroup, load: ExpertLoad) -> None:
    """Make `ep_implementation=EXPERT_DISPATCH` known to transformers, for the models loaded next."""
    EPImplementationInterface.register(EXPERT_DISPATCH, partial(ExpertDispatch, group=group, load=load))


def settle(net: nn.Module, group: RankGroup, load: ExpertLoad) -> None:
    """Replace the layers that transformers cut for this rank."""
    for parent, name, child in list(_children(net)):
        if type(child) is nn.Linear and isinstance(child.weight, DTensor):
            setattr(parent, name, _linear(child, group, gathers=child is net.get_output_embeddings()))  # type: ignore[operator]
    for module in net.modules():
        cut = [name for name, value in module.named_parameters(recurse=False) if isinstance(value, DTensor)]
        for name in cut:
            setattr(module, name, nn.Parameter(_local(getattr(module, name)), requires_grad=False))
        if cut and hasattr(module, "num_experts") and not getattr(module, "_is_expert_parallel", False):
            module.forward = partial(_summed_experts, module, group, load)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A plain linear layer of `weight` [outputs, inputs]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _summed_experts(
    module: Any, group: RankGroup, load: ExpertLoad, hidden_states: torch.Tensor, chosen: torch.Tensor, *args: Any
) -> torch.Tensor:
    """Every expert's share on this rank (where experts do not divide among ranks), summed over ranks."""
    load.count(module.num_experts, chosen)
    return group.total(type(module).forward(module, hidden_states, chosen, *args))


def _linear(linear: nn.Linear, group: RankGroup, *, gathers: bool) -> nn.Module:
    weight: Any = linear.weight
    bias = None if linear.bias is None else _local(linear.bias)
    (placement,) = weight.placements
    if placement == Shard(1):
        return SummedLinear(group, _local(weight), bias)
    if not gathers:
        return linear_of(_local(weight), bias)
    step = -(-linear.out_features // group.size)
    widths = tuple(max(0, min(step, linear.out_features - rank * step)) for rank in range(group.size))
    return GatheredLinear(group, _local(weight), bias, widths)


def _local(value: Any) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _children(net: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for module in net.modules():
        for name, child in module.named_children():
            yield module, name, child
