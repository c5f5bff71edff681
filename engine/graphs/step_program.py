"""The forward pass as a native step program: one call a step, the CPU's counterpart of a graph.

Built once from a decoder; layers whose weights are not loaded yet are loaded when they are packed.
The residual stream is float32; what products read is rounded to the program's format. Which models
it covers is said in `coverage.py`; what a layer does stands in `StepProgramBuilder._layer`,
operation by operation.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remora.configs.window_plan import WindowRoom
from remora.engine.inputs import RowTable, StepInputs
from remora.engine.layers.attention import SelfAttention
from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import MLP
from remora.engine.layers.norm import Norm, RMSNorm
from remora.engine.models.decoder import DecoderBlock, DecoderModel
from remora.engine.protocols import PROMPT_LOGPROB_ROWS, Fill, nothing_left
from remora.kernels.cpu.buffers import Batch, PagedCache, Rows, Updates
from remora.kernels.cpu.library import PANEL, Epilogue, Format, Team
from remora.kernels.cpu.packing import PackedWeight, pack
from remora.kernels.cpu.program import Program
from remora.kernels.lora import LowRankSlots
from remora.kernels.memory import Arena, buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The most that one step holds.

    num_pages:      of the KV pool, the dump page 0 not counted
    max_positions:  tokens of the longest sequence
    windows:        pages of layers with a window, where these have their own
    """

    max_tokens: int
    max_rows: int
    num_pages: int
    page_size: int
    max_positions: int
    windows: WindowRoom | None = None


class StepProgram:
    """ForwardPass that runs in the native library.

    weight_bytes:  bytes of packed weights that one step reads; the embedding's table not counted
    """

    def __init__(
        self,
        program: Program,
        *,
        head_start: int,
        logits: Tensor,
        stream: Tensor,
        norm: tuple[Tensor, float],
        weight_bytes: int,
    ) -> None:
        """See `StepProgramBuilder`.

        head_start:  the first operation that works on rows of logits
        logits:      [most rows, vocab_size], where the program leaves them
        stream:      [most tokens, hidden_size] float32, what the last layer leaves
        norm:        weight [hidden_size] and epsilon of the norm before the head
        """
        self._program = program
        self._head_start = head_start
        self._logits = logits
        self._stream = stream
        self._norm = norm
        self.weight_bytes = weight_bytes

    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size], overwritten by the next call."""
        batch = self._program.batch
        num_tokens, num_rows = inputs.num_tokens, len(inputs.rows)
        num_logits = len(inputs.logit_index)
        batch.token_ids[:num_tokens] = inputs.token_ids
        batch.positions[:num_tokens] = inputs.positions
        batch.slots[:num_tokens] = inputs.slots
        batch.starts[: num_rows + 1] = inputs.starts
        batch.lengths[:num_rows] = inputs.lengths
        batch.table_rows[:num_rows] = inputs.rows
        batch.logit_index[:num_logits] = inputs.logit_index
        batch.adapters[:num_tokens] = inputs.adapters
        if inputs.windows is not None:
            batch.window_slots[:num_tokens] = inputs.windows.slots
        self._program.run(num_tokens, num_rows, num_logits)
        return self._logits[:num_logits]

    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""
        count = last - first
        self._program.batch.logit_index[:count] = range(first, last)
        self._program.run(0, 0, count, first=self._head_start)
        return self._logits[:count]

    def hidden(self, first: int, last: int) -> Tensor:
        """Return final hidden states [last - first, hidden_size] of tokens of the latest step."""
        stream = self._stream[first:last]
        weight, epsilon = self._norm
        scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + epsilon)
        return stream * scale * weight

    def close(self) -> None:
        """End the threads."""
        self._program.team.close()


class StepProgramBuilder:
    """Goes through a model once, packing weights and adding operations.

    Layers that have adapters by then keep their slots: what is written there later counts at once.
    The model's weights are given up: it cannot run by itself after `build`.
    """

    def __init__(
        self,
        model: DecoderModel,
        team: Team,
        shape: StepShape,
        table: RowTable,
        *,
        layer_format: Format,
        head_format: Format,
    ) -> None:
        config = model.config
        self._model, self._config, self._team = model, config, team
        self._shape = shape
        self._format, self._head_format = layer_format, head_format
        self._max_logits = max(shape.max_rows, PROMPT_LOGPROB_ROWS)
        self._weight_bytes = 0
        self._shrunk: dict[int, Tensor] = {}
        self._arena = Arena()
        batch = Batch(
            max_tokens=shape.max_tokens,
            max_rows=shape.max_rows,
            max_logits=self._max_logits,
            tables=torch.from_numpy(table.tables),
            window_tables=None
            if table.window_tables is None
            else torch.from_numpy(table.window_tables),
        )
        self._program = Program(team, batch)
        self._places = self._allocate()
        positions = torch.arange(shape.max_positions)
        self._angles: list[tuple[Tensor, Tensor]] = []
        for rotary in model.rotaries:
            cosines, sines = rotary.angles(positions, torch.float32)
            self._angles.append((cosines.contiguous(), sines.contiguous()))

    def _allocate(self) -> list[tuple[PagedCache, int]]:
        """Allocate KV memory; returns each layer's cache and which layer of it that is."""
        config, shape = self._config, self._shape

        def allocate(num_layers: int, num_pages: int, *, is_windowed: bool = False) -> PagedCache:
            return PagedCache.allocate(
                self._team,
                num_layers=num_layers,
                num_pages=num_pages + 1,
                page_size=shape.page_size,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                is_bf16=self._model.dtype == torch.bfloat16,
                is_windowed=is_windowed,
            )

        if shape.windows is None:
            cache = allocate(config.num_layers, shape.num_pages)
            return [(cache, layer) for layer in range(config.num_layers)]
        apart = shape.windows.layers
        caches = (
            allocate(len(apart) - sum(apart), shape.num_pages),
            allocate(sum(apart), shape.windows.num_pages, is_windowed=True),
        )
        return [
            (caches[is_apart], sum(other == is_apart for other in apart[:layer]))
            for layer, is_apart in enumerate(apart)
        ]

    def build(self, fill: Fill = nothing_left) -> StepProgram:
        """Pack everything; call it once.

        fill:  loads the model's weights, a block when it is packed, unless they are there
        """
        model, program, config = self._model, self._program, self._config
        fill(model.outer_tensors().keys())
        head = self._pack(model.head.linear, self._head_format)  # before blocks fill the memory
        self._stream = self._floats(config.hidden_size)
        self._normal = self._operand(config.hidden_size, in_floats=False)
        self._normal_in_floats = self._operand(config.hidden_size)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._qkv = self._floats(heads * config.head_dim)
        self._attended = self._operand(config.num_heads * config.head_dim)
        self._gated = self._operand(config.intermediate_size)

        program.embed(model.embedding.weight, self._stream)
        if model.embedding.adapters is not None:
            program.update_embedded(self._updates(model.embedding.adapters), self._stream)
        for layer, block in enumerate(model.blocks):
            fill(model.block_tensors(layer).keys())
            self._layer(layer, block)
        head_start = len(program)
        logits = self._head(head)
        # After the head, which may be packed from the same weight.
        scale = config.embedding.scale / config.block.residual_scale
        if scale != 1.0:
            model.embedding.weight.mul_(scale)
        return StepProgram(
            program,
            head_start=head_start,
            logits=logits[:, : model.vocab_size],
            stream=self._stream[:, : config.hidden_size],
            norm=(model.norm.weight.float(), self._epsilon(model.norm)),
            weight_bytes=self._weight_bytes,
        )

    def _layer(self, layer: int, block: DecoderBlock) -> None:
        config, program = self._config, self._program
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, SelfAttention)
        assert isinstance(mlp, MLP)
        assert isinstance(block.attention_norm, RMSNorm)
        assert isinstance(block.mlp_norm, RMSNorm)
        cache, place = self._places[layer]

        normal = self._normalize(block.attention_norm, attention.qkv_proj)
        self._multiply(normal, attention.qkv_proj, self._qkv)
        cosines, sines = self._angles[block.rotary]
        norms = attention.head_norms
        program.rotate_and_store(
            self._qkv,
            cache,
            place,
            num_heads=config.num_heads,
            cosines=cosines,
            sines=sines,
            head_norms=None
            if norms is None
            else (norms[0].weight.float(), norms[1].weight.float()),
            epsilon=0.0 if norms is None else norms[0].eps,
        )
        program.attend(
            self._qkv,
            cache,
            place,
            self._attended.written.values,
            num_heads=config.num_heads,
            scale=attention.rule.scale,
            window=attention.rule.window,
        )
        self._multiply(self._attended, attention.o_proj, self._stream, Epilogue.ADD)

        normal = self._normalize(block.mlp_norm, mlp.gate_up_proj)
        self._multiply(normal, mlp.gate_up_proj, self._gated.written.values, Epilogue.GATED)
        self._multiply(self._gated, mlp.down_proj, self._stream, Epilogue.ADD)

    def _head(self, weight: PackedWeight) -> Tensor:
        """Add the last norm and the head; returns where the logits will be."""
        adapters, config = self._model.head.linear.adapters, self._config
        in_floats = adapters is not None
        normal = self._operand(config.hidden_size, in_floats=in_floats, on_logits=True)
        logits = self._floats(self._model.vocab_size, on_logits=True)
        self._program.norm(
            self._stream,
            self._model.norm.weight.float() * config.head.scale,
            self._epsilon(self._model.norm),
            normal.written,
            on_logits=True,
        )
        self._add_product(normal, weight, adapters, logits)
        return logits

    def _normalize(self, norm: RMSNorm, linear: Linear) -> _Operand:
        """Add a norm of the stream; returns what `linear` reads."""
        normal = self._normal if linear.adapters is None else self._normal_in_floats
        weight = norm.weight.float()
        self._program.norm(self._stream, weight, self._epsilon(norm), normal.written)
        return normal

    def _epsilon(self, norm: Norm) -> float:
        """Return a norm's epsilon for the stream as it is kept: divided by the residual scale.

        What blocks add needs no factor then, and norms do not care for one on all of their input.
        """
        return norm.eps / self._config.block.residual_scale**2

    def _multiply(
        self, x: _Operand, linear: Linear, out: Tensor, epilogue: Epilogue = Epilogue.STORE
    ) -> None:
        """Add the product with a layer's weight and, where it has them, its adapters."""
        weight = self._pack(linear, x.rows.format, gated=epilogue is Epilogue.GATED)
        self._add_product(x, weight, linear.adapters, out, epilogue)

    def _pack(self, linear: Linear, format: Format, *, gated: bool = False) -> PackedWeight:
        weight, bias = linear.release()
        packed = pack(
            self._team,
            weight,
            bias,
            format,
            self._arena,
            gated=gated,
            spent=linear.owns_weight,
        )
        self._weight_bytes += packed.num_bytes
        return packed

    def _add_product(
        self,
        x: _Operand,
        weight: PackedWeight,
        adapters: LowRankSlots | None,
        out: Tensor,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        program, updates = self._program, None
        if adapters is not None:
            updates = self._updates(adapters)
            program.shrink(x.written.values, updates, on_logits=x.on_logits)
        if x.rows is not x.written:
            program.quantize(x.written.values, x.size, x.rows, on_logits=x.on_logits)
        program.multiply(x.rows, weight, out, epilogue, updates=updates, on_logits=x.on_logits)

    def _updates(self, slots: LowRankSlots) -> Updates:
        width = slots.a.shape[1]
        if width not in self._shrunk:
            num_rows = max(self._shape.max_tokens, self._max_logits)
            self._shrunk[width] = buffer((num_rows, width), torch.float32)
        return Updates(slots, self._shrunk[width])

    def _num_rows(self, on_logits: bool) -> int:
        return self._max_logits if on_logits else self._shape.max_tokens

    def _floats(self, size: int, *, on_logits: bool = False) -> Tensor:
        """Allocate [T or R, size] with room for the panels that products write."""
        return buffer((self._num_rows(on_logits), _whole_panels(size)), torch.float32)

    def _operand(self, size: int, *, in_floats: bool = True, on_logits: bool = False) -> _Operand:
        """Allocate what one operation writes and a product reads.

        in_floats:  it is not written in groups, even if that is how it is read
        """
        format = self._head_format if on_logits else self._format

        def rows(format: Format) -> Rows:
            num_rows, padded = self._num_rows(on_logits), _whole_panels(size)
            return Rows.allocate(self._team, format, num_rows, padded)

        read = rows(format)
        written = rows(Format.F32) if format.is_grouped and in_floats else read
        return _Operand(written=written, rows=read, size=size, on_logits=on_logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operand:
    """Rows that one operation writes and a product reads.

    written:    `size` values a row, or more
    rows:       what is read: the same rows, or quantised ones
    on_logits:  there are R of them, not T
    """

    written: Rows
    rows: Rows
    size: int
    on_logits: bool


def _whole_panels(size: int) -> int:
    return -(-size // PANEL) * PANEL
