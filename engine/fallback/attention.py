"""Runs remora's attention backend inside models of transformers, by its attention interface.

A model calls the registered function for each of its attentions, and passes the current step along
as a keyword. The n-th call of a pass is attention n, whatever the model names its layers. Does not
know how models are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.protocols import AttentionBackend
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope

PAGED = "remora"
STEP = "remora_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """The arguments of one attention of a model.

    scale:      factor on q.k before softmax
    window:     a query sees the last `window` positions, including its own; None = all
    soft_cap:   bound of the scores; None = none
    has_sinks:  whether softmax has an additional term for each head
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


class Step:
    """One pass of a model over a batch: the arguments of its attentions, in order."""

    def __init__(
        self,
        attentions: Sequence[Attended],
        rules: dict[int, AttentionSpec],
        batch: ForwardBatch,
        backend: AttentionBackend,
    ) -> None:
        """Begin a pass.

        rules:  of the attentions, from the first pass and the same in all others
        """
        self._attentions = attentions
        self._rules = rules
        self._batch = batch
        self._backend = backend
        self._next = 0
        nothing = batch.positions.new_empty((len(batch.positions), 0), dtype=torch.float32)
        self._turn = QKNormRope(cos=nothing, sin=nothing)  # heads come turned

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend [1, heads, T, dim]; returns [1, T, heads, value dim]."""
        number = self._next
        self._next += 1
        facts = self._attentions[number]
        if facts.value_dim != facts.head_dim:
            value = F.pad(value, (0, facts.head_dim - facts.value_dim))
        heads = torch.cat([part.transpose(1, 2) for part in (query, key, value)], dim=2)[0]
        rule = self._rules.get(number)
        if rule is None:
            rule = self._rules[number] = AttentionSpec(
                scale=facts.scale,
                window=facts.window,
                soft_cap=facts.soft_cap,
                sinks=None if sinks is None else sinks.detach().float(),
            )
        out = self._backend.attend(number, heads, self._turn, self._batch, rule)
        return out[..., : facts.value_dim].unsqueeze(0)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    s_aux: Tensor | None = None,
    remora_step: Step,
    **_known: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers requests; `probe.py` has checked the other arguments."""
    return remora_step.attend(query, key, value, s_aux), None


def register() -> str:
    """Register the function with transformers; returns its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _attend)
    return PAGED
