"""Layers of experts as operations of a step program.

Knows routing, gathering, products and the weighted sum; nothing of the surrounding layer.

Legend: T tokens of a step, E experts, k of them for each token, H hidden size, I inner size.
"""

from __future__ import annotations

from torch import Tensor

from remora.engine.graphs.operands import Operand, RowBuffers, allocate_floats, whole_panels
from remora.engine.graphs.step_products import Products
from remora.engine.graphs.step_weights import GATE, Weights
from remora.engine.layers.experts import EXPERTS, Experts
from remora.engine.models.config import ExpertsConfig
from remora.kernels.cpu import experts as native
from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.library import Format
from remora.kernels.cpu.packing import PackedWeight, pack
from remora.kernels.cpu.program import Program
from remora.kernels.memory import Arena


class ExpertSteps:
    """Adds the operations of layers of one shape, which share their memory.

    exact:  [T, H] float32, the layer's input as the router reads it
    share:  [T, >= 1] float32, buffer for the gate of shared experts
    """

    def __init__(
        self,
        program: Program,
        config: ExpertsConfig,
        hidden_size: int,
        *,
        max_tokens: int,
        arena: Arena,
        products: Products,
        weights: Weights,
    ) -> None:
        """See `add`; `arena`: memory of packed weights."""
        self._program, self._config = program, config
        self._arena, self._products, self._weights = arena, products, weights
        team, top_k = program.team, config.routing.top_k
        self.exact = Rows.allocate(team, Format.F32, max_tokens, whole_panels(hidden_size))
        self._logits = allocate_floats(max_tokens, config.num_experts)
        self.share = allocate_floats(max_tokens, 1)
        self._choices = native.Choices.allocate(
            num_tokens=max_tokens, num_experts=config.num_experts, top_k=top_k
        )
        self._weighed = RowBuffers(team, max_tokens, hidden_size)
        num_pairs = max_tokens * top_k
        self._read = RowBuffers(team, num_pairs, hidden_size)
        self._gated = RowBuffers(team, num_pairs, config.size)
        self._given = allocate_floats(num_pairs, hidden_size)
        self._hidden_size = hidden_size

    def add(self, experts: Experts, prefix: str, hidden: Operand, out: Rows) -> int:
        """Add a layer's experts, without shared ones.

        prefix:  of the names of the layer's tensors
        hidden:  [T, >= H] input of the experts, written to `exact`, which the router reads
        out:     [T, >= H] float32, to which the output is added
        The layer's weights are packed and released. Returns the bytes that one token reads of them.
        """
        program, choices = self._program, self._choices
        router = self.pack(*experts.router.release(), Format.F32)
        program.multiply(self.exact, router, self._logits)
        native.route(program, self._logits, self._config.routing, experts.correction, choices)
        gate_up, down = self._pack_experts(experts, prefix)
        of_inner, of_outer = gate_up[0].format, down[0].format
        if self._config.weighs_inputs:
            given = self._weighed.rows(of_inner)
            native.scale_tokens(program, self.exact.values, self._hidden_size, given, choices)
        else:
            given = self._products.rounded(hidden, of_inner)
        native.sort_pairs(program, choices)
        read, gated = self._read.rows(of_inner), self._gated.operand([of_outer])
        native.gather(program, given, read, choices)
        native.multiply_experts(
            program,
            read,
            gate_up,
            gated.written.values,
            choices,
            gating=self._config.gating,
        )
        rows = gated.rows(of_outer)
        if rows is not gated.written:
            top_k = choices.top_k
            program.round(gated.written.values, gated.size, rows, rows_per_token=top_k)
        native.multiply_experts(program, rows, down, self._given, choices)
        native.add_weighted(
            program, self._given, self._hidden_size, choices.weights, out.values, choices
        )
        of_all = sum(weight.num_bytes for weight in (*gate_up, *down))
        return router.num_bytes + of_all * choices.top_k // choices.num_experts

    def pack(
        self, weight: Tensor, bias: Tensor | None, format: Format, *, gated: bool = False
    ) -> PackedWeight:
        """Pack a weight that has no other reader."""
        team = self._program.team
        return pack(team, weight, bias, format, self._arena, gated=gated, spent=True)

    def _pack_experts(
        self, experts: Experts, prefix: str
    ) -> tuple[list[PackedWeight], list[PackedWeight]]:
        """Return the packed gate-up and down projections of each expert."""
        of_inner, of_outer = experts.biases
        number, pack_all = self._config.num_experts, self._weights.pack_experts
        names = [f"{prefix}{EXPERTS}{expert}." for expert in range(number)]
        gate_up = pack_all(names, (GATE, "up_proj"), experts.gate_up, of_inner)
        down = pack_all(names, ("down_proj",), experts.down, of_outer)
        experts.release()
        return gate_up, down
