"""The decoder of every family; families differ only in their `DecoderConfig`.

Knows the layers, their order, and which of them a rank holds. Opens no files: `tensors` maps each
checkpoint tensor to the memory of this rank's shard, and the loader writes there. Names are
Llama's; `engine/weights/rename_tensors.py` translates other checkpoints'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.engine.layers.attention import SelfAttention
from remora.engine.layers.embedding import Embedding, Head
from remora.engine.layers.experts import Experts
from remora.engine.layers.latent_attention import LatentAttention
from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import MLP
from remora.engine.layers.norm import Norm, make_norm
from remora.engine.layers.rotary import RotaryEmbedding
from remora.engine.models.captures import Captures
from remora.engine.models.config import DecoderConfig, ExpertsConfig
from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.layout import NOTHING, WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import (
    AttentionBackend,
    Fill,
    HoldsWeights,
    UpdatePlace,
    nothing_left,
)
from remora.engine.runner.batch import ForwardBatch
from remora.kernels.linear_invariant import linear_invariant
from remora.kernels.lora import NO_GROUPS, RowGroups

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
POSITIONS, LAST_NORM = "model.embed_positions", "model.norm"

Angles = tuple[Tensor, Tensor]


class DecoderBlock:
    """One layer: attention and feed-forward, sequential or parallel.

    The layer's config decides which classes the parts have (`_make_attention`, `_make_mlp`).
    norms:   by the names of `BlockConfig`; None = no such norm
    rotary:  index of its RoPE in the model's `rotaries`
    """

    rotary = 0

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: str,
        layout: Layout = WHOLE,
    ) -> None:
        self.config = config.block
        self.attention = _make_attention(config, layer, dtype, device, layout)
        self.mlp = _make_mlp(config, layer, dtype, device, layout)

        def norm(name: str | None) -> Norm | None:
            if name is None:
                return None
            return make_norm(config.block.norm, config.hidden_size, dtype=dtype, device=device)

        self.attention_norm = norm(config.block.attention_norm)
        self.attention_out_norm = norm(config.block.attention_out_norm)
        self.mlp_norm = norm(config.block.mlp_norm)
        self.mlp_out_norm = norm(config.block.mlp_out_norm)
        self._residual_scale = config.block.residual_scale
        self._is_parallel = config.block.parallel

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        attention: AttentionBackend,
        group: Group,
    ) -> tuple[Tensor, Tensor]:
        """Take the previous layer's addition to the stream; return this layer's, and the stream.

        delta, residual:  [num_tokens, hidden_size]; `residual` is overwritten
        angles:           cosines and sines [num_tokens, pairs] of the layer's RoPE
        """
        hidden, residual = _enter(self.attention_norm, delta, residual)
        attended = self.attention(hidden, *angles, batch, attention, group)
        if self._is_parallel:
            if self.mlp_norm is not None:
                hidden = self.mlp_norm(residual)
            both = group.all_reduce(attended.add_(self._feed_forward(hidden, batch)))
            return self._leave(None, both), residual
        attended = self._leave(self.attention_out_norm, group.all_reduce(attended))
        hidden, residual = _enter(self.mlp_norm, attended, residual)
        made = group.all_reduce(self._feed_forward(hidden, batch))
        return self._leave(self.mlp_out_norm, made), residual

    def _feed_forward(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        if isinstance(self.mlp, Experts):
            return self.mlp(hidden, batch.adapters, batch.slots if batch.is_padded else None)
        return self.mlp(hidden, batch.adapters)

    def _leave(self, norm: Norm | None, made: Tensor) -> Tensor:
        """Apply the norm and the scale of a part's output."""
        if norm is not None:
            made = norm(made)
        return made if self._residual_scale == 1.0 else made.mul_(self._residual_scale)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yield the linear layers, each with the prefix of its parts' names."""
        for linear in self.attention.linears():
            yield f"{prefix}self_attn.", linear
        yield from self.mlp.linears(f"{prefix}mlp.")

    def weight_holders(self) -> Iterator[HoldsWeights]:
        """Yield the parts with large weights: all but norms, routers and biases."""
        for _, linear in self.linears(""):
            yield linear
        for part in (self.attention, self.mlp):
            if isinstance(part, LatentAttention | Experts):
                yield part

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the shard of it that this rank holds."""
        config = self.config
        yield from self.attention.tensors(f"{prefix}self_attn.")
        yield from self.mlp.tensors(f"{prefix}mlp.")
        for name, norm in (
            (config.attention_norm, self.attention_norm),
            (config.attention_out_norm, self.attention_out_norm),
            (config.mlp_norm, self.mlp_norm),
            (config.mlp_out_norm, self.mlp_out_norm),
        ):
            if norm is not None:
                yield from norm.tensors(f"{prefix}{name}")


def _enter(norm: Norm | None, delta: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Add `delta` to the stream, in place; return a part's input, and the stream."""
    if norm is not None:
        return norm.add(delta, residual)
    if delta is not None:
        residual += delta
    return residual, residual


def _make_attention(
    config: DecoderConfig, layer: int, dtype: torch.dtype, device: str, layout: Layout
) -> SelfAttention | LatentAttention:
    if config.attention.latent is not None:
        return LatentAttention(config, layer, dtype=dtype, device=device, layout=layout)
    return SelfAttention(config, layer, dtype=dtype, device=device, layout=layout)


def _make_mlp(
    config: DecoderConfig, layer: int, dtype: torch.dtype, device: str, layout: Layout
) -> MLP | Experts:
    mlp = config.layers[layer].mlp
    if isinstance(mlp, ExpertsConfig):
        return Experts(mlp, config.hidden_size, dtype=dtype, device=device, layout=layout)
    return MLP(mlp, config.hidden_size, dtype=dtype, device=device, layout=layout)


class DecoderModel:
    """One rank's shard of a decoder; its weights are written to `tensors`.

    layers:     of its pipeline stage, counted in the whole model
    positions:  table of learned positions; None = none
    rotaries:   one for each RoPE config of the stage's layers
    dequantised: names of the weights that are quantised in the checkpoint and not in layers
    captures:   keeps the inputs of some layers; None = of none
    """

    dequantised: frozenset[str] = frozenset()
    captures: Captures | None = None

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: str, layout: Layout = WHOLE
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.layout = layout
        self.vocab_size = config.vocab_size
        self.layers = layout.layers(config.num_layers)
        size = config.hidden_size
        share = layout.share(config.vocab_size)
        self.embedding = Embedding(
            Axis(config.vocab_size, share if layout.is_first_stage else NOTHING),
            size,
            dtype=dtype,
            device=device,
        )
        self.positions: Tensor | None = None
        if config.embedding.num_positions and layout.is_first_stage:
            shape = (config.embedding.num_positions, size)
            self.positions = torch.empty(shape, dtype=dtype, device=device)
        self.blocks = [
            DecoderBlock(config, layer, dtype=dtype, device=device, layout=layout)
            for layer in self.layers
        ]
        ropes = [config.layers[layer].rope for layer in self.layers]
        kinds = list(dict.fromkeys(ropes))
        self.rotaries = [RotaryEmbedding(kind, config.head_dim, device=device) for kind in kinds]
        for block, rope in zip(self.blocks, ropes, strict=True):
            block.rotary = kinds.index(rope)
        self.norm = make_norm(config.block.norm, size, dtype=dtype, device=device)
        is_tied = config.head.tied
        self.head = Head(
            EMBEDDING if is_tied else HEAD,
            Axis(config.vocab_size, share if layout.is_last_stage else NOTHING),
            config.hidden_size,
            tied=self.embedding if is_tied and layout.pp_size == 1 else None,
            bias=config.head.bias,
            scale=config.head.scale,
            soft_cap=config.head.soft_cap,
            dtype=dtype,
            device=device,
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        attention: AttentionBackend,
        *,
        group: Group = ALONE,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states [T, hidden_size] of the batch, after the last norm.

        With several stages only the last returns them; others return the next stage's input.
        stream:  [T, hidden_size] of the previous stage, overwritten; None on the first stage
        """
        if stream is None:
            stream = self._embed(batch, group)
        angles = [rotary.angles(batch.positions, self.dtype) for rotary in self.rotaries]
        delta: Tensor | None = None
        for layer, block in zip(self.layers, self.blocks, strict=True):
            if self.captures is not None:
                self.captures.keep(layer, delta, stream)
            delta, stream = block(delta, stream, angles[block.rotary], batch, attention, group)
        if self.layout.is_last_stage:
            return self.norm.add(delta, stream)[0]
        return stream if delta is None else stream.add_(delta)

    def _embed(self, batch: ForwardBatch, group: Group) -> Tensor:
        """Return the first layer's input, [T, hidden_size]."""
        stream = group.all_reduce(self.embedding(batch.token_ids, batch.adapters))
        if batch.embedded is not None:
            stream[batch.embedded.places] = batch.embedded.rows.to(stream.dtype)
        if self.config.embedding.scale != 1.0:
            stream *= self.embedding_scale
        if self.positions is not None:
            stream += F.embedding(batch.positions, self.positions)
        return stream

    @property
    def embedding_scale(self) -> float:
        """The factor on token embeddings, rounded to the weights' dtype."""
        return float(torch.tensor(self.config.embedding.scale, dtype=self.dtype))

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Project hidden states [R, hidden_size] to float32 logits [R, held vocabulary]."""
        return self.head(hidden, adapters)

    def tensors(self) -> dict[str, Shard]:
        """Map each tensor name of a checkpoint to the shard of it that this rank holds."""
        named = self.outer_tensors()
        for number in range(len(self.blocks)):
            named.update(self.block_tensors(number))
        return named

    def outer_tensors(self) -> dict[str, Shard]:
        """Map the names of the tensors outside of blocks."""
        named = dict(self.embedding.tensors(EMBEDDING))
        if self.positions is not None:
            axes = tuple(map(Axis.whole, self.positions.shape))
            named[f"{POSITIONS}.weight"] = Shard(memory=self.positions, axes=axes)
        named.update(self.norm.tensors(LAST_NORM))
        named.update(self.head.tensors())
        return named

    def block_tensors(self, number: int) -> dict[str, Shard]:
        """Map the names of the tensors of one of `blocks`."""
        return dict(self.blocks[number].tensors(f"model.layers.{self.layers[number]}."))

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield linear layers whose weights may be quantised, with the prefix of their names."""
        for layer, block in zip(self.layers, self.blocks, strict=True):
            yield from block.linears(f"model.layers.{layer}.")
        if not self.head.tied:
            yield "", self.head.linear

    def experts(self) -> Iterator[tuple[str, Experts]]:
        """Yield layers of experts, with the prefix of their names."""
        for layer, block in zip(self.layers, self.blocks, strict=True):
            if isinstance(block.mlp, Experts):
                yield f"model.layers.{layer}.mlp.", block.mlp

    def allocate_slots(self, room: LoRASlotConfig) -> dict[str, UpdatePlace]:
        """Allocate adapter slots; returns the slots for updates of each weight.

        The head's name is `lm_head` even if it shares the embedding's weight; updates are separate.
        """
        size = (room.num_slots, room.max_rank)
        places: dict[str, UpdatePlace] = {}
        if self.layout.is_first_stage and EMBEDDING.rpartition(".")[2] in room.targets:
            self.embedding.allocate_slots(*size)
            places[f"{EMBEDDING}.weight"] = self.embedding.place()
        for layer, block in zip(self.layers, self.blocks, strict=True):
            for prefix, linear in block.linears(f"model.layers.{layer}."):
                if not linear.parts.keys().isdisjoint(room.targets):
                    linear.allocate_slots(*size)
                    places.update(linear.places(prefix))
        if self.layout.is_last_stage and HEAD in room.targets:
            self.head.linear.allocate_slots(*size)
            ((_, place),) = self.head.linear.places("")
            places[f"{HEAD}.weight"] = place
        return places

    def tabulate_angles(self, num_positions: int) -> None:
        """Compute the rotary angles of all positions once instead of in each step."""
        for rotary in self.rotaries:
            rotary.tabulate(num_positions, self.dtype)

    def narrow_routers(self) -> None:
        """Hold the routers of experts in the model's dtype where that rounds nothing."""
        for _, experts in self.experts():
            experts.narrow_router()

    def make_invariant(self) -> None:
        """Make a row's bits independent of the other rows in the batch.

        Raises ConfigError for a model with products that have no such kernel.
        """
        if self.config.attention.latent is not None:
            raise ConfigError(
                "engine.deterministic is true, and latent attention multiplies each head by itself,"
                " for which there is no deterministic kernel; set it to false"
            )
        for block in self.blocks:
            for _, linear in block.linears(""):
                linear.product = linear_invariant
            if isinstance(block.mlp, Experts):
                block.mlp.make_invariant()
        self.head.linear.product = linear_invariant

    def load_on_host(self, layers: Collection[int]) -> None:
        """Let the large weights of these layers be loaded into host memory; call it before that.

        layers:  counted in the whole model; those of other ranks are passed over
        """
        for layer, block in zip(self.layers, self.blocks, strict=True):
            for holder in block.weight_holders() if layer in layers else ():
                holder.weight_device = "cpu"

    @torch.inference_mode()
    def pack(self, fill: Fill = nothing_left) -> None:
        """Convert every weight to this machine's layout; `tensors` is invalid afterwards.

        fill:  loads the weights that are missing, a block at a time before it is packed
        """
        fill(self.outer_tensors().keys())
        self.head.pack()
        for number, block in enumerate(self.blocks):
            fill(self.block_tensors(number).keys())
            block.attention.pack()
            block.mlp.pack()
