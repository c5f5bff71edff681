"""A model whose decode steps run through torch.compile: norms, activations and sums become kernels.

One graph of the whole pass serves every number of rows. Attention is an operation in it that torch
does not look into: it runs the backend as it is, with pages and lengths of which the graph knows
nothing. What a step may differ in is thus its rows alone, so the compiled code is not guarded: it
is never compiled again while requests wait, and never left for the slower way unseen.

Prompts, larger steps and rows with adapters run uncompiled. Knows nothing of requests or devices.
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

TRACED_ROWS = 4  # any number would do, but for 0 and 1
_NUMBERS = itertools.count()
_RUNNING: weakref.WeakValueDictionary[int, _Attending] = weakref.WeakValueDictionary()


class CompiledModel:
    """Model: decode steps of up to `max_rows` rows are compiled, others run as they are."""

    def __init__(self, model: Model, attention: AttentionBackend, max_rows: int) -> None:
        """Take over a model and what it attends with; `compile` comes next."""
        self.vocab_size = model.vocab_size
        self._model = model
        self._max_rows = max_rows
        self._attending = _Attending(attention)
        self._pass: Callable[[Tensor, Tensor], Tensor] | None = None

    @torch.inference_mode()
    def compile(self, batch: ForwardBatch) -> None:
        """Compile; takes seconds to minutes.

        batch:  a decode step of at least two rows, which is run
        Raises ConfigError where the model or the machine does not allow it.
        """
        self._model.forward(batch, _Noting(self._attending))
        self._attending.batch = batch
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
        except Exception as error:  # of many kinds, all of torch's own
            said = str(getattr(error, "inner_exception", error)).strip().partition("\n\n")[0]
            raise ConfigError(
                "engine.compile = true: torch.compile has failed. It does not take models with "
                "experts or latent attention, and on a CPU it needs a C++ compiler (CXX names it). "
                f"Leave engine.compile out to serve without. It said: {said}"
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
        ):
            return self._model.forward(batch, attention)
        self._attending.batch = batch
        return self._pass(batch.token_ids, batch.positions)

    def logits(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Project hidden states to logits, uncompiled: it is one product."""
        return self._model.logits(hidden, adapters)

    def _run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        tokens = _Tokens(token_ids, positions, NO_GROUPS)
        return self._model.forward(tokens, self._attending)  # type: ignore[arg-type]


def _own(function: FunctionType) -> FunctionType:
    """Return a function of the same code, but not of the same code object.

    torch keeps what it compiles by code object: without guards one model would run another's.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What a model may know of a batch while it is compiled."""

    token_ids: Tensor
    positions: Tensor
    adapters: RowGroups


@dataclass(frozen=True, slots=True)
class _Note:
    """What is the same in every step of a layer: how it attends, and the shape of its results."""

    turn: QKNormRope
    rule: AttentionSpec
    shape: tuple[int, ...]


class _Attending:
    """What attends in compiled code: an operation that finds its way back here by `number`."""

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention = attention
        self.notes: dict[int, _Note] = {}
        self.batch: ForwardBatch | None = None
        self.number = next(_NUMBERS)
        _RUNNING[self.number] = self

    def attend(
        self, layer: int, heads: Tensor, turn: QKNormRope, batch: ForwardBatch, rule: AttentionSpec
    ) -> Tensor:
        """Stand for the backend while the model is compiled."""
        result: Tensor = torch.ops.remora.attend(self.number, layer, heads, turn.cos, turn.sin)
        return result

    def run(self, layer: int, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend in the step that runs."""
        note, batch = self.notes[layer], self.batch
        assert batch is not None, "no step runs"
        turn = replace(note.turn, cos=cos, sin=sin)
        return self.attention.attend(layer, heads, turn, batch, note.rule)


class _Noting:
    """AttentionBackend that takes notes of a step."""

    def __init__(self, attending: _Attending) -> None:
        self._attending = attending

    def attend(
        self, layer: int, heads: Tensor, turn: QKNormRope, batch: ForwardBatch, rule: AttentionSpec
    ) -> Tensor:
        """Attend, and note how."""
        out = self._attending.attention.attend(layer, heads, turn, batch, rule)
        nothing = heads.new_empty(0)
        kept = replace(turn, cos=nothing, sin=nothing)
        self._attending.notes[layer] = _Note(kept, rule, tuple(out.shape[1:]))
        return out


@torch.library.custom_op("remora::attend", mutates_args=())
def _attend(number: int, layer: int, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _RUNNING[number].run(layer, heads, cos, sin)


@_attend.register_fake
def _(number: int, layer: int, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return heads.new_empty(heads.shape[0], *_RUNNING[number].notes[layer].shape)
