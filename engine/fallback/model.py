"""Runs a causal model of transformers with remora's KV cache, loader and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from remora.configs.errors import ConfigError
from remora.engine.fallback.attention import STEP, Step
from remora.engine.fallback.head import split_ends
from remora.engine.fallback.linear import Ranks, divide
from remora.engine.fallback.structure import Structure
from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import AttentionBackend
from remora.engine.runner.batch import AttentionSpec, ForwardBatch
from remora.kernels.lora import NO_GROUPS, RowGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackSize:
    """Sizes of the whole model."""

    hidden_size: int
    num_kv_heads: int
    head_dim: int


class FallbackModel:
    """One rank's shard of a model of transformers; its weights are written to `tensors`.

    layers:  its attentions
    """

    def __init__(
        self, structure: Structure, *, dtype: torch.dtype, device: str, layout: Layout = WHOLE
    ) -> None:
        self.name = structure.name
        self.dtype = dtype
        self.layout = layout
        self.layers = range(len(structure.attentions))
        self._attentions = structure.attentions
        self._rules: dict[int, AttentionSpec] = {}
        self._ranks = Ranks()
        model = structure.build(dtype)
        head: nn.Linear = model.get_output_embeddings()
        self.vocab_size = int(head.out_features)
        self.config = FallbackSize(
            hidden_size=int(head.in_features),
            num_kv_heads=structure.attentions[0].num_kv_heads,
            head_dim=structure.attentions[0].head_dim,
        )
        table: Tensor = model.get_input_embeddings().weight
        self.is_tied = head.weight is table
        axes: dict[str, tuple[Axis, ...]] = {}
        if layout.tp_size > 1:
            axes = divide(model, head, layout, self._ranks)
            axes |= _divide_head(model, head, layout, self.is_tied)
        self._tensors = _allocate(model, axes, dtype, torch.device(device))
        if self.is_tied and layout.tp_size > 1:
            held = layout.share(self.vocab_size)
            rows = model.get_input_embeddings().weight[held.start : held.stop]
            head.weight = nn.Parameter(rows, requires_grad=False)
        self._table_bytes = model.get_input_embeddings().weight.nbytes
        self._ends = split_ends(model)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        attention: AttentionBackend,
        *,
        group: Group = ALONE,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states [T, hidden_size] of the batch, after the last norm."""
        assert stream is None, "there is one stage"
        self._ranks.group = group
        return self._decode(
            batch.token_ids, batch.positions, Step(self._attentions, self._rules, batch, attention)
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Project hidden states [R, hidden_size] to float32 logits [R, its vocabulary]."""
        if len(hidden) == 0:
            held = self._ends.head.weight.shape[0]
            return torch.empty((0, held), device=hidden.device)
        return self._ends.logits(hidden).float()

    def tensors(self) -> dict[str, Shard]:
        """Map each of transformers' names to the shard of the tensor that this rank holds."""
        return self._tensors

    def step_weight_bytes(self) -> int:
        """Return an upper bound of the weight bytes that a step reads: all experts are counted."""
        held = sum(shard.memory.nbytes for shard in self._tensors.values())
        return held if self.is_tied else held - self._table_bytes

    @torch.inference_mode()
    def check(self) -> None:
        """Raise ConfigError if tokens of a step depend on each other by other means than attention.

        Such a means (a convolution, a state) would mix sequences that share a step. With attention
        that returns zeros, a token's result must not depend on the token before it.
        """
        device = self._ends.head.weight.device
        positions = torch.arange(2, device=device)
        first, other = (
            self._decode(torch.tensor(ids, device=device), positions, _Nothing())[1].float()
            for ids in ([3, 5], [4, 5])
        )
        if not torch.allclose(first, other, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise ConfigError(
                f"{self.name} cannot be run by transformers' code on our KV cache: its layers "
                "carry more than attention does from token to token."
            )

    def _decode(self, token_ids: Tensor, positions: Tensor, step: Step | _Nothing) -> Tensor:
        made = self._ends.decoder(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **{STEP: step}
        )
        return cast("Tensor", made.last_hidden_state[0])


class _Nothing:
    """A step whose attentions return zeros."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Return zeros [1, T, heads, value dim]."""
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


def _divide_head(
    model: Any, head: nn.Linear, layout: Layout, is_tied: bool
) -> dict[str, tuple[Axis, ...]]:
    """Give a rank its shard of the head; a tied head takes it from the embedding table."""
    name = next(name for name, module in model.named_modules() if module is head)
    rows = Axis(head.out_features, layout.share(head.out_features))
    axes: dict[str, tuple[Axis, ...]] = {}
    for part in ("weight", "bias"):
        memory = getattr(head, part)
        if memory is None or (part == "weight" and is_tied):
            continue
        smaller = memory.new_empty((len(rows.held), *memory.shape[1:]))
        setattr(head, part, nn.Parameter(smaller, requires_grad=False))
        axes[f"{name}.{part}"] = (rows, *map(Axis.whole, memory.shape[1:]))
    return axes


def _allocate(
    model: Any, axes: dict[str, tuple[Axis, ...]], dtype: torch.dtype, device: torch.device
) -> dict[str, Shard]:
    """Allocate parameters and move buffers to the device; return the parameters to load."""
    exact = [
        re.compile(rf"(^|\.){pattern}(\.|$)")
        for pattern, kept in model._get_dtype_plan(dtype).items()
        if kept == torch.float32
    ]
    made: dict[str, Shard] = {}
    new: dict[int, nn.Parameter] = {}
    for name, old in model.named_parameters():
        wanted = torch.float32 if any(one.search(name) for one in exact) else old.dtype
        memory = torch.empty(old.shape, dtype=wanted, device=device)
        new[id(old)] = nn.Parameter(memory, requires_grad=False)
        whole = tuple(map(Axis.whole, old.shape))
        made[name] = Shard(memory=memory, axes=axes.get(name, whole))
    kept = set(model.state_dict())
    for prefix, module in model.named_modules():
        for key, old in list(module._parameters.items()):
            if old is not None:
                module._parameters[key] = new[id(old)]
        for name, buffer in _buffers(module, device):
            full = f"{prefix}.{name}" if prefix else name
            if full in kept:
                made[full] = Shard(memory=buffer, axes=tuple(map(Axis.whole, buffer.shape)))
    return made


def _buffers(module: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Move a module's own buffers to a device; yield them."""
    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            module._buffers[name] = buffer.to(device)
            yield name, module._buffers[name]  # type: ignore[misc]
