"""The forward pass as a native step program: one call a step, the CPU's counterpart of a graph.

Built once from a decoder whose weights are loaded. The residual stream is float32; what products
read is rounded to the program's format. Covers every dense family of `DecoderConfig`. What a layer
does stands in `StepProgramBuilder._layer`, operation by operation.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remora.engine.inputs import RowTable, StepInputs
from remora.engine.layers.linear import Linear
from remora.engine.models.decoder import DecoderBlock, DecoderModel
from remora.engine.protocols import PROMPT_LOGPROB_ROWS
from remora.kernels.cpu.buffers import Batch, PagedCache, Rows
from remora.kernels.cpu.library import Epilogue, Format, Team
from remora.kernels.cpu.packing import PackedWeight, pack
from remora.kernels.cpu.program import Program
from remora.kernels.memory import Arena, buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The most that one step holds.

    num_pages:      of the KV pool, the dump page 0 not counted
    max_positions:  tokens of the longest sequence
    """

    max_tokens: int
    max_rows: int
    num_pages: int
    page_size: int
    max_positions: int


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
        cache: PagedCache,
        weight_bytes: int,
    ) -> None:
        """See `StepProgramBuilder`.

        head_start:  the first operation that works on rows of logits
        logits:      [most rows, vocab_size], where the program leaves them
        """
        self._program = program
        self._head_start = head_start
        self._logits = logits
        self.cache = cache
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
        self._program.run(num_tokens, num_rows, num_logits)
        return self._logits[:num_logits]

    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""
        count = last - first
        self._program.batch.logit_index[:count] = range(first, last)
        self._program.run(0, 0, count, first=self._head_start)
        return self._logits[:count]

    def close(self) -> None:
        """End the threads."""
        self._program.team.close()


class StepProgramBuilder:
    """Goes through a model once, packing weights and adding operations.

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
        self._arena = Arena()
        batch = Batch(
            max_tokens=shape.max_tokens,
            max_rows=shape.max_rows,
            max_logits=self._max_logits,
            tables=torch.from_numpy(table.tables),
        )
        self._program = Program(team, batch)
        self._cache = PagedCache.allocate(
            team,
            num_layers=config.num_layers,
            num_pages=shape.num_pages + 1,
            page_size=shape.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            is_bf16=model.dtype == torch.bfloat16,
        )
        positions = torch.arange(shape.max_positions)
        cosines, sines = model.rotary.angles(positions, torch.float32)
        self._angles = (cosines.contiguous(), sines.contiguous())

    def build(self) -> StepProgram:
        """Pack everything; call it once."""
        model, program = self._model, self._program
        config = self._config
        stream = self._floats(config.hidden_size)
        self._stream = stream
        self._normal = self._rows(config.hidden_size)
        self._qkv: Tensor | None = None
        self._attended = self._operand(config.num_heads * config.head_dim)
        self._gated = self._operand(config.intermediate_size)

        program.embed(model.embedding.weight, stream)
        for layer, block in enumerate(model.blocks):
            self._layer(layer, block)
        head_start = len(program)
        normal = Rows.allocate(self._team, self._head_format, self._max_logits, config.hidden_size)
        head = self._pack(model.head.linear, self._head_format)
        logits = buffer((self._max_logits, head.out_columns), torch.float32)
        program.norm(stream, model.norm.weight.float(), config.norm_eps, normal, on_logits=True)
        program.multiply(normal, head, logits, on_logits=True)
        return StepProgram(
            program,
            head_start=head_start,
            logits=logits[:, : model.vocab_size],
            cache=self._cache,
            weight_bytes=self._weight_bytes,
        )

    def _layer(self, layer: int, block: DecoderBlock) -> None:
        config, program = self._config, self._program
        attention, mlp = block.attention, block.mlp
        eps = config.norm_eps

        program.norm(self._stream, block.attention_norm.weight.float(), eps, self._normal)
        qkv_proj = self._pack(attention.qkv_proj)
        if self._qkv is None:
            self._qkv = buffer((self._shape.max_tokens, qkv_proj.out_columns), torch.float32)
        program.multiply(self._normal, qkv_proj, self._qkv)
        norms = attention.head_norms
        program.rotate_and_store(
            self._qkv,
            self._cache,
            layer,
            num_heads=config.num_heads,
            cosines=self._angles[0],
            sines=self._angles[1],
            head_norms=None
            if norms is None
            else (norms[0].weight.float(), norms[1].weight.float()),
            epsilon=eps,
        )
        program.attend(
            self._qkv,
            self._cache,
            layer,
            self._attended.source,
            num_heads=config.num_heads,
            scale=attention.scale,
            window=attention.window,
        )
        o_proj = self._pack(attention.o_proj)
        program.multiply(self._attended.ready(program), o_proj, self._stream, Epilogue.ADD)

        program.norm(self._stream, block.mlp_norm.weight.float(), eps, self._normal)
        gate_up = self._pack(mlp.gate_up_proj, gated=True)
        program.multiply(self._normal, gate_up, self._gated.source, Epilogue.GATED)
        down = self._pack(mlp.down_proj)
        program.multiply(self._gated.ready(program), down, self._stream, Epilogue.ADD)

    def _pack(
        self, linear: Linear, format: Format | None = None, *, gated: bool = False
    ) -> PackedWeight:
        weight, bias = linear.release()
        packed = pack(self._team, weight, bias, format or self._format, self._arena, gated=gated)
        self._weight_bytes += packed.num_bytes
        return packed

    def _rows(self, size: int) -> Rows:
        return Rows.allocate(self._team, self._format, self._shape.max_tokens, size)

    def _floats(self, size: int) -> Tensor:
        """Allocate [T, size] with room for the panels that products write."""
        return buffer((self._shape.max_tokens, -(-size // 64) * 64), torch.float32)

    def _operand(self, size: int) -> _Operand:
        """Allocate what one operation writes and a product reads."""
        rows = self._rows(-(-size // 64) * 64)
        if self._format.is_grouped:
            return _Operand(source=self._floats(size), size=size, rows=rows)
        return _Operand(source=rows.values, size=size, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operand:
    """Rows that are written as floats or bf16, and read by a product.

    source:  [T, size or more] what is written
    rows:    what is read: the same memory, or quantised from it
    """

    source: Tensor
    size: int
    rows: Rows

    def ready(self, program: Program) -> Rows:
        """Return the rows to multiply, after the operation that makes them from the source."""
        if self.rows.format.is_grouped:
            program.quantize(self.source, self.size, self.rows)
        return self.rows
