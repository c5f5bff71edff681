"""Splits the linear layers of a model of transformers between ranks by its tensor-parallel plan.

A plan names modules and how each is split. Splits of outputs or inputs of linear layers are
supported; for other plans the reason is kept, and several ranks are refused. Knows only the names
of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.shard import Axis

# Norms of single heads are the same on all ranks.
WHOLE_STYLES = {"replicated_with_grad_allreduce"}
OUTPUTS, INPUTS = "colwise", "rowwise"


class Ranks:
    """The group of ranks that share a model, once they are connected; used for sums."""

    group: Group = ALONE


class OutputShare(nn.Module):
    """A linear layer with this rank's outputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Project to this rank's outputs."""
        return F.linear(x, self.weight, self.bias)


class InputShare(OutputShare):
    """A linear layer with this rank's inputs; the ranks sum their results."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ranks: Ranks) -> None:
        super().__init__(weight, bias)
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """Project this rank's inputs and sum over the ranks."""
        made = self._ranks.group.all_reduce(F.linear(x, self.weight).contiguous())
        return made if self.bias is None else made + self.bias


def reason_against_shares(model: Any, head: nn.Linear) -> str:
    """Return why a model cannot be split between ranks; empty if it can."""
    plan = _plan(model)
    if not any(style == INPUTS for style in plan.values()):
        return "transformers has no plan for dividing it"
    for name, style, module in _matches(model, plan):
        if module is head or style in WHOLE_STYLES:
            continue
        if style not in (OUTPUTS, INPUTS) or not isinstance(module, nn.Linear):
            return f"transformers' plan divides {name} as {style}, which is not done here"
    return ""


def divide(
    model: Any, head: nn.Linear, layout: Layout, ranks: Ranks
) -> dict[str, tuple[Axis, ...]]:
    """Replace the plan's layers by a rank's shards; return the axes of their weights, by name."""
    axes: dict[str, tuple[Axis, ...]] = {}
    for name, style, module in list(_matches(model, _plan(model))):
        if module is head or style in WHOLE_STYLES:
            continue
        outputs, inputs = Axis.whole(module.out_features), Axis.whole(module.in_features)
        made: nn.Module
        bias = module.bias
        if style == OUTPUTS:
            outputs = Axis(outputs.size, layout.share(outputs.size))
            if bias is not None:
                bias = bias.new_empty(len(outputs.held))
            made = OutputShare(_sized(module.weight, outputs, inputs), bias)
        else:
            inputs = Axis(inputs.size, layout.share(inputs.size))
            made = InputShare(_sized(module.weight, outputs, inputs), bias, ranks)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)
        axes[f"{name}.weight"] = (outputs, inputs)
        axes[f"{name}.bias"] = (outputs,)
    return axes


def _sized(weight: Tensor, outputs: Axis, inputs: Axis) -> Tensor:
    return torch.empty(
        (len(outputs.held), len(inputs.held)), dtype=weight.dtype, device=weight.device
    )


def _plan(model: Any) -> Mapping[str, str]:
    plan: Mapping[str, str] = (
        getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    )
    return plan


def _matches(model: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Yield the modules and parameters of the plan, each with its style.

    Embedding tables are omitted: every rank has them whole, whatever the plan says.
    """
    rules = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+")), style)
        for pattern, style in plan.items()
    ]
    for named in (model.named_modules(), model.named_parameters()):
        for name, part in named:
            if isinstance(part, nn.Embedding):
                continue
            for pattern, style in rules:
                if pattern.fullmatch(name):
                    yield name, style, part
                    break
