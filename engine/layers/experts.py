"""Mixture-of-experts feed-forward layer: each token uses a few of many small gated layers.

Every rank has the whole router and a shard of each expert's inner columns, so its result is a
partial sum. Routing and products are in `kernels/moe_routing.py` and `kernels/moe.py`, which do not
synchronise with the device.

Legend: T tokens, E experts, H hidden size, I this rank's part of an expert's inner size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from remora.engine.layers.linear import Linear, allocate_weight
from remora.engine.layers.mlp import MLP
from remora.engine.models.config import ExpertsConfig
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.kernels.linear import can_pack, linear_to_float32, pack_weight, writes_float32
from remora.kernels.linear_invariant import linear_invariant
from remora.kernels.lora import NO_GROUPS, RowGroups
from remora.kernels.moe import moe, moe_by_expert
from remora.kernels.moe_routing import route
from remora.kernels.moe_weights import Biases, StackableWeight
from remora.kernels.quantised.quant_formats import num_bytes, tensors_of, with_tensors

SHARED, EXPERTS = "shared_experts.", "experts."


class Experts:
    """A router, routed experts, and shared experts that every token uses.

    router:       float32, because rounding would change the selected experts; see `narrow_router`
    correction:   [E] float32 or None, added to the scores for the selection only
    quantised:    `gate_up` and `down` quantised, in the place of these; None = not quantised
    biases:       [E, 2 * I] and [E, H], the latter on one rank only; None = no biases
    weight_device: where the routed experts are loaded; the router is on the layer's device
    shared_gate:  whose sigmoid what the shared experts give is multiplied with
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: str,
        layout: Layout = WHOLE,
    ) -> None:
        self.config = config
        self._outer = Axis.whole(hidden_size)
        self._inner = Axis(config.size, layout.share(config.size))
        number, held = config.num_experts, len(self._inner.held)
        experts = Axis.whole(number)
        self.dtype, self.device, self.weight_device = dtype, device, device
        exact = torch.float32
        self.router = Linear(
            self._outer, {"gate": experts}, bias=config.router_bias, dtype=exact, device=device
        )
        self.correction = torch.empty(number, device=device) if config.correction else None
        self.quantised: tuple[StackableWeight, StackableWeight] | None = None
        self.biases: Biases = (None, None)
        if config.bias:
            of_all = torch.empty(number, hidden_size, dtype=dtype, device=device)
            of_inner = torch.empty(number, 2 * held, dtype=dtype, device=device)
            self.biases = of_inner, of_all if layout.tp_rank == 0 else None
        self.shared: MLP | None = None
        self.shared_gate: Linear | None = None
        if config.shared is not None:
            self.shared = MLP(config.shared, hidden_size, dtype=dtype, device=device, layout=layout)
        if config.shared_gate:
            one = {"shared_expert_gate": Axis.whole(1)}
            self.shared_gate = Linear(self._outer, one, bias=False, dtype=dtype, device=device)
        self._invariant = False
        self._packed: tuple[list[Tensor], list[Tensor]] | None = None

    @cached_property
    def gate_up(self) -> Tensor:
        """[E, 2 * I, H], gates first; allocated at its first use."""
        shape = self.config.num_experts, 2 * len(self._inner.held), self._outer.size
        return allocate_weight(shape, self.dtype, self.weight_device)

    @cached_property
    def down(self) -> Tensor:
        """[E, H, I], allocated at its first use."""
        shape = self.config.num_experts, self._outer.size, len(self._inner.held)
        return allocate_weight(shape, self.dtype, self.weight_device)

    def __call__(
        self, hidden: Tensor, adapters: RowGroups = NO_GROUPS, slots: Tensor | None = None
    ) -> Tensor:
        """Apply to [T, H].

        slots:  as in `route`
        """
        config = self.config
        logits = self.router(hidden.to(self.router.weight.dtype))
        ids, weights = route(logits, config.routing, self.correction, slots)
        routed = hidden
        if config.weighs_inputs:  # of its one expert
            routed = (hidden * weights).to(hidden.dtype)
            weights = torch.ones_like(weights)
        made = self._multiply(routed, ids, weights)
        if self.shared is None:
            return made
        shared = self.shared(hidden, adapters)
        if self.shared_gate is not None:
            shared *= torch.sigmoid(self.shared_gate(hidden))
        return made.add_(shared)

    def _multiply(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        biases, gating = self.biases, self.config.gating
        if self._packed is not None:
            out = torch.empty_like(hidden)
            return moe_by_expert(
                hidden, ids, weights, *self._packed, biases=biases, gating=gating, out=out
            )
        gate_up, down = self.quantised or (self.gate_up, self.down)
        return moe(
            hidden,
            ids,
            weights,
            gate_up,
            down,
            biases=biases,
            gating=gating,
            invariant=self._invariant,
        )

    def idle_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the experts that `num_tokens` tokens do not use, on average."""
        share = 1 - self.config.experts_read(num_tokens) / self.config.num_experts
        return round(self.num_bytes * share)

    @property
    def num_bytes(self) -> int:
        """The bytes of all routed experts."""
        if self.quantised is not None:
            return sum(map(num_bytes, self.quantised))
        return self.gate_up.nbytes + self.down.nbytes

    def narrow_router(self) -> None:
        """Hold the router in the dtype of its inputs, if that rounds neither weights nor logits.

        The device must write float32 sums. Steps then need no float32 copy of the inputs.
        """
        weight = self.router.weight
        narrow = weight.to(self.dtype)
        if writes_float32(weight.device, self.dtype) and torch.equal(narrow.float(), weight):
            self.router.weight, self.router.product = narrow, linear_to_float32

    def make_invariant(self) -> None:
        """Make a row's bits independent of the other rows in the batch."""
        self._invariant = True
        for linear in (self.router, self.shared_gate):
            if linear is not None:
                linear.product = linear_invariant

    def pack(self) -> None:
        """Pack every expert's weights, and the linears; see `Linear.pack`."""
        if self.device == "cpu" and self.dtype == torch.bfloat16 and can_pack():
            self._packed = (
                [pack_weight(weight) for weight in self.gate_up],
                [pack_weight(weight) for weight in self.down],
            )
            self.gate_up, self.down = self.gate_up.new_empty(0), self.down.new_empty(0)
        if self.shared is not None:
            self.shared.pack()

    def release(self) -> tuple[Tensor, Tensor]:
        """Return `gate_up` and `down` and drop them; the layer cannot compute afterwards."""
        gate_up, down = self.gate_up, self.down
        self.gate_up, self.down = gate_up.new_empty(0), down.new_empty(0)
        return gate_up, down

    def weight_tensors(self) -> list[Tensor]:
        """Return the tensors of the routed experts' weights, quantised or not."""
        if self.quantised is None:
            return [self.gate_up, self.down]
        return [tensor for each in self.quantised for tensor in tensors_of(each).values()]

    def set_weight_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace the tensors of the routed experts' weights, in the order of `weight_tensors`."""
        given = iter(tensors)
        if self.quantised is None:
            self.gate_up, self.down = given
        else:
            gate_up, down = self.quantised
            self.quantised = with_tensors(gate_up, given), with_tensors(down, given)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yield the linear layers that adapters may change, with the prefix of their names."""
        if self.shared is not None:
            yield from self.shared.linears(f"{prefix}{SHARED}")

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the part of it that is held."""
        yield from self.router.tensors(prefix)
        if self.correction is not None:
            whole = Axis.whole(len(self.correction))
            name = f"{prefix}gate.e_score_correction_bias"
            yield name, Shard(memory=self.correction, axes=(whole,))
        held = len(self._inner.held)
        for expert in range(self.config.num_experts):
            of_expert = f"{prefix}{EXPERTS}{expert}."
            if self.quantised is None:
                gate, up = self.gate_up[expert, :held], self.gate_up[expert, held:]
                axes = (self._inner, self._outer)
                yield f"{of_expert}gate_proj.weight", Shard(memory=gate, axes=axes)
                yield f"{of_expert}up_proj.weight", Shard(memory=up, axes=axes)
                down = Shard(memory=self.down[expert], axes=(self._outer, self._inner))
                yield f"{of_expert}down_proj.weight", down
            yield from self._bias_tensors(of_expert, expert)
        if self.shared is not None:
            yield from self.shared.tensors(f"{prefix}{SHARED}")
        if self.shared_gate is not None:
            yield from self.shared_gate.tensors(prefix)

    def weights(self, prefix: str) -> list[dict[str, tuple[Axis, Axis]]]:
        """Return the checkpoint names of each expert's gate, up and down, with their dimensions."""
        inward, outward = (self._inner, self._outer), (self._outer, self._inner)
        axes = {"gate_proj": inward, "up_proj": inward, "down_proj": outward}
        return [
            {f"{prefix}{EXPERTS}{expert}.{name}.weight": axes[name] for name in axes}
            for expert in range(self.config.num_experts)
        ]

    def _bias_tensors(self, prefix: str, expert: int) -> Iterator[tuple[str, Shard]]:
        of_inner, of_all = self.biases
        if of_inner is not None:
            gate, up = of_inner[expert].chunk(2)
            yield f"{prefix}gate_proj.bias", Shard(memory=gate, axes=(self._inner,))
            yield f"{prefix}up_proj.bias", Shard(memory=up, axes=(self._inner,))
        if of_all is not None:
            yield f"{prefix}down_proj.bias", Shard(memory=of_all[expert], axes=(self._outer,))
