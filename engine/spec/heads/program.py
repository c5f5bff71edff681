"""Step programs of draft heads: one layer over given inputs.

The caller computes what a layer reads, because it is small: embeddings, states and their norms. The
program multiplies and attends. Its KV has the pages of the target's rows.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from torch import Tensor

from remora.engine.graphs.operands import Operand, allocate_floats
from remora.engine.graphs.step_builder import StepProgramBuilder
from remora.engine.graphs.step_products import Products
from remora.engine.graphs.step_weights import Piece, Weights
from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import MLP
from remora.engine.models.decoder import DecoderBlock
from remora.engine.protocols import Fill
from remora.engine.spec.heads.head import DraftHead
from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.library import Activation
from remora.kernels.cpu.program import Program


class HeadProgram:
    """The operations of a draft head.

    joined:  [T, inputs] float32, read by `join`, which writes `stream`
    stream:  [T, hidden_size] float32, which the layer changes
    inputs:  [T, 2 * hidden_size] float32 that attention reads instead of `stream`; None = it reads
             `stream`
    final:   [R, hidden_size] float32, which the output head reads
    logits:  [R, vocabulary]
    """

    def __init__(
        self,
        program: Program,
        *,
        layer_start: int,
        head_start: int,
        joined: Tensor,
        stream: Tensor,
        inputs: Tensor | None,
        final: Tensor,
        logits: Tensor,
        weight_bytes: int,
    ) -> None:
        self.joined, self.stream, self.inputs = joined, stream, inputs
        self.final, self.logits = final, logits
        self.weight_bytes = weight_bytes
        self.batch = program.batch
        self._program = program
        self._layer_start, self._head_start = layer_start, head_start

    def join(self, num_tokens: int) -> None:
        """Project `joined` to `stream`."""
        self._program.run(num_tokens, 0, 0, last=self._layer_start)

    def layer(self, num_tokens: int, num_rows: int) -> None:
        """Run the layer on the batch's arrays."""
        first, last = self._layer_start, self._head_start
        self._program.run(num_tokens, num_rows, 0, first=first, last=last)

    def head(self, num_rows: int) -> Tensor:
        """Project `final`; returns float32 logits [R, vocabulary], overwritten by the next call."""
        self._program.run(0, 0, num_rows, first=self._head_start)
        return self.logits[:num_rows]


class HeadProgramBuilder(StepProgramBuilder):
    """Packs a draft head's weights and adds its operations."""

    def build_head(self, head: DraftHead, fill: Fill, target: tuple[Piece, ...]) -> HeadProgram:
        """Pack the head; call it once, instead of `build`.

        fill:    loads the head's tensors
        target:  the packed output head of the target, for a head without its own
        """
        model, program, size = self._model, self._program, self._config.hidden_size
        names = self._head_names(head)
        weights = Weights(
            self._team, self._arena, names, fill, self._formats, head=model.head.linear
        )
        self._weights = weights
        self._products = Products(program, weights, max(self._shape.max_tokens, self._max_logits))
        fill(head.tensors().keys() - {*self._of_experts(), *chain.from_iterable(names.values())})
        if not head.config.own_head:
            weights.share(model.head.linear, target)
        self._allocate_rows()
        joined = self._floats(len(head.fc.inputs.held))
        source = Operand(
            written=Rows.of(joined),
            size=len(head.fc.inputs.held),
            buffers=self._rows(len(head.fc.inputs.held)),
        )
        self._products.add(source, head.fc, self._stream)
        layer_start = len(program)
        self._given: Operand | None = None
        inputs: Tensor | None = None
        if head.config.kind == "eagle3":
            inputs = self._floats(2 * size)
            self._given = Operand(
                written=Rows.of(inputs), size=2 * size, buffers=self._rows(2 * size)
            )
        self._layer(0, model.blocks[0])
        head_start = len(program)
        final = allocate_floats(self._max_logits, size)
        rows = Operand(written=Rows.of(final), size=size, buffers=self._rows(size, on_logits=True))
        logits = self._floats(model.vocab_size, on_logits=True)
        limit = self._config.head.soft_cap
        self._products.add(
            rows,
            model.head.linear,
            logits,
            activation=Activation.LINEAR if limit is None else Activation.CAP,
            limit=limit or 0.0,
        )
        return HeadProgram(
            program,
            layer_start=layer_start,
            head_start=head_start,
            joined=joined,
            stream=self._stream,
            inputs=inputs,
            final=final,
            logits=logits[:, : model.vocab_size],
            weight_bytes=weights.weight_bytes + self._weight_bytes,
        )

    def _head_names(self, head: DraftHead) -> Mapping[Linear, tuple[str, ...]]:
        """Map the linear layers to the names of their weights, part by part."""
        linears = [*self._model.blocks[0].linears("model.layers.0."), ("", head.fc)]
        if head.config.own_head:
            linears.append(("", self._model.head.linear))
        return {
            linear: tuple(f"{prefix}{part}.weight" for part in linear.parts)
            for prefix, linear in linears
        }

    def _layer(self, layer: int, block: DecoderBlock) -> None:
        """Add the layer; EAGLE-3's attention reads both inputs, and adds to the stream."""
        if self._given is None:
            super()._layer(layer, block)
            return
        attended = self._attend(layer, block, self._given)
        self._leave(attended, block.attention.o_proj, None)
        mlp = block.mlp
        assert isinstance(mlp, MLP), "the layer is a Llama's"
        hidden = self._enter(block.mlp_norm, mlp.gate_up_proj)
        gated = self._feed_forward(self._config.layers[layer].mlp, mlp, hidden)
        self._leave(gated, mlp.down_proj, None)
