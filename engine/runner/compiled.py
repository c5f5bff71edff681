"""A model whose decode steps run through torch.compile, which fuses norms, activations and sums.

One graph of the whole pass serves every number of rows. Attention is an opaque operation in it that
runs the backend with the step's own pages and lengths. Steps therefore differ in their number of
rows only, and the code is compiled without guards: it never recompiles while requests wait, and
never falls back to eager execution silently.

Prompts, larger steps, rows with adapters and given embeddings run uncompiled. Knows nothing of
requests or devices.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import cast

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.protocols import AttentionBackend, Model
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.kernels.lora import NO_GROUPS, RowGroups

TRACED_ROWS = 4  # any number above 1, which torch specialises on
_NUMBERS = itertools.count()
_RUNNING: weakref.WeakValueDictionary[int, _CompiledAttention] = weakref.WeakValueDictionary()


class CompiledModel:
    """Model: decode steps of up to `max_rows` rows are compiled, others run as they are."""

    def __init__(self, model: Model, attention: AttentionBackend, max_rows: int) -> None:
        """Wrap a model and its attention backend; call `compile` next."""
        self.vocab_size = model.vocab_size
        self._model = model
        self._max_rows = max_rows
        self._compiled_attention = _CompiledAttention(attention)
        self._pass: Callable[[Tensor, Tensor], Tensor] | None = None

    @torch.inference_mode()
    def compile(self, batch: ForwardBatch) -> None:
        """Compile; takes seconds to minutes.

        batch:  a decode step of at least two rows, which runs
        Raises ConfigError if torch cannot compile the model on this machine.
        """
        self._model.forward(batch, _SpecRecorder(self._compiled_attention))
        self._compiled_attention.batch = batch
        compiled = torch.compile(
            MethodType(_own(cast("FunctionType", CompiledModel._run)), self),
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": lambda guards: [False] * len(guards)},
        )
        tokens = batch.token_ids, batch.positions
        for tensor in tokens:
            torch._dynamo.decorators.mark_unbacked(tensor, 0, strict=True)
        try:
            compiled(*tokens)
        except Exception as error:  # torch raises many kinds
            said = str(getattr(error, "inner_exception", error)).strip().partition("\n\n")[0]
            raise ConfigError(
                f"engine.compile = true: torch.compile failed: {said}. It supports no experts or "
                "latent attention, and needs a C++ compiler on a CPU (set CXX). Remove "
                "engine.compile to serve without it."
            ) from error
        self._pass = compiled

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the final hidden states [T, hidden_size] of the batch."""
        num_tokens = len(batch.token_ids)
        if (
            self._pass is None
            or not batch.num_decodes == num_tokens <= self._max_rows
            or batch.adapters.groups
            or batch.adapters.tiles is not None
            or batch.embedded is not None
        ):
            return self._model.forward(batch, attention)
        self._compiled_attention.batch = batch
        return self._pass(batch.token_ids, batch.positions)

    def logits(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Project hidden states to logits, uncompiled: one matrix product."""
        return self._model.logits(hidden, adapters)

    def _run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        tokens = _Tokens(token_ids, positions, NO_GROUPS)
        return self._model.forward(tokens, self._compiled_attention)  # type: ignore[arg-type]


def _own(function: FunctionType) -> FunctionType:
    """Return a copy of a function with a code object of its own.

    torch caches compiled code by code object: without guards one model would run another's.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The part of a batch that a compiled model may read."""

    token_ids: Tensor
    positions: Tensor
    adapters: RowGroups
    embedded: None = None


@dataclass(frozen=True, slots=True)
class _LayerSpec:
    """A layer's constants: QK norm, attention spec and the shape of its results."""

    rope: QKNormRope
    spec: AttentionSpec
    shape: tuple[int, ...]


class _CompiledAttention:
    """Attention of compiled code: a custom operation that finds this object by `number`."""

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention = attention
        self.layers: dict[int, _LayerSpec] = {}
        self.batch: ForwardBatch | None = None
        self.number = next(_NUMBERS)
        _RUNNING[self.number] = self

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Call the custom operation in place of the backend, while the model is compiled."""
        result: Tensor = torch.ops.remora.attend(self.number, layer, heads, rope.cos, rope.sin)
        return result

    def run(self, layer: int, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend with the current step's batch."""
        fixed, batch = self.layers[layer], self.batch
        assert batch is not None, "no step runs"
        rope = replace(fixed.rope, cos=cos, sin=sin)
        return self.attention.attend(layer, heads, rope, batch, fixed.spec)


class _SpecRecorder:
    """AttentionBackend that records each layer's constants."""

    def __init__(self, compiled_attention: _CompiledAttention) -> None:
        self._compiled_attention = compiled_attention

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Attend, and record the layer's constants."""
        out = self._compiled_attention.attention.attend(layer, heads, rope, batch, spec)
        nothing = heads.new_empty(0)
        kept = replace(rope, cos=nothing, sin=nothing)
        self._compiled_attention.layers[layer] = _LayerSpec(kept, spec, tuple(out.shape[1:]))
        return out


@torch.library.custom_op("remora::attend", mutates_args=())
def _attend(number: int, layer: int, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _RUNNING[number].run(layer, heads, cos, sin)


@_attend.register_fake
def _(number: int, layer: int, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return heads.new_empty(heads.shape[0], *_RUNNING[number].layers[layer].shape)
