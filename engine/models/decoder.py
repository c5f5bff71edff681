"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 differ only in their `DecoderConfig`.

Knows layers and the order of their parts, and which of them a rank holds. Knows nothing of files:
`tensors` says which part of which checkpoint tensor fills which memory, and whoever loads writes
there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from remora.configs.plan import AdapterRoom
from remora.engine.batch import ForwardBatch
from remora.engine.layers.attention import SelfAttention
from remora.engine.layers.embedding import Embedding, Head
from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import GatedMLP
from remora.engine.layers.norm import RMSNorm
from remora.engine.layers.rotary import RotaryEmbedding
from remora.engine.models.config import DecoderConfig
from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.layout import NOTHING, WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import AttentionBackend, UpdatePlace
from remora.kernels.linear_invariant import linear_invariant
from remora.kernels.lora import NO_GROUPS, RowGroups

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


class DecoderBlock:
    """One layer: attention and feed-forward, each behind a norm."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: str,
        layout: Layout = WHOLE,
    ) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(size, eps=eps, dtype=dtype, device=device)
        self.attention = SelfAttention(config, layer, dtype=dtype, device=device, layout=layout)
        self.mlp_norm = RMSNorm(size, eps=eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, dtype=dtype, device=device, layout=layout)

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        attention: AttentionBackend,
        group: Group,
    ) -> tuple[Tensor, Tensor]:
        """Take what the layer before adds to the stream; return what this one adds, and the stream.

        delta, residual:  [num_tokens, hidden_size]; `residual` is overwritten
        """
        hidden, residual = self.attention_norm.add(delta, residual)
        hidden = group.all_reduce(self.attention(hidden, cos, sin, batch, attention))
        hidden, residual = self.mlp_norm.add(hidden, residual)
        return group.all_reduce(self.mlp(hidden, batch.adapters)), residual

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yield its linear layers, each with the beginning of its parts' names."""
        for linear in self.attention.linears():
            yield f"{prefix}self_attn.", linear
        for linear in self.mlp.linears():
            yield f"{prefix}mlp.", linear

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the part of it that is held."""
        yield from self.attention_norm.tensors(f"{prefix}input_layernorm")
        yield from self.attention.tensors(f"{prefix}self_attn.")
        yield from self.mlp_norm.tensors(f"{prefix}post_attention_layernorm")
        yield from self.mlp.tensors(f"{prefix}mlp.")


class DecoderModel:
    """One rank's share of a decoder; its weights are whatever was written to `tensors`.

    layers:  those of its stage, counted in the whole model
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: str, layout: Layout = WHOLE
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.layout = layout
        self.vocab_size = config.vocab_size
        self.layers = layout.layers(config.num_layers)
        share = layout.share(config.vocab_size)
        self.embedding = Embedding(
            Axis(config.vocab_size, share if layout.is_first_stage else NOTHING),
            config.hidden_size,
            dtype=dtype,
            device=device,
        )
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device=device)
        self.blocks = [
            DecoderBlock(config, layer, dtype=dtype, device=device, layout=layout)
            for layer in self.layers
        ]
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device)
        is_tied = config.tied_embeddings
        self.head = Head(
            EMBEDDING if is_tied else HEAD,
            Axis(config.vocab_size, share if layout.is_last_stage else NOTHING),
            config.hidden_size,
            tied=self.embedding if is_tied and layout.pp_size == 1 else None,
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

        With several stages that is the last one's; those before return what the next one takes.
        stream:  [T, hidden_size] from the stage before, overwritten; None on the first stage
        """
        if stream is None:
            stream = group.all_reduce(self.embedding(batch.token_ids, batch.adapters))
        cos, sin = self.rotary.angles(batch.positions, self.dtype)
        delta: Tensor | None = None
        for block in self.blocks:
            delta, stream = block(delta, stream, cos, sin, batch, attention, group)
        if self.layout.is_last_stage:
            return self.norm.add(delta, stream)[0]
        return stream if delta is None else stream.add_(delta)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Project hidden states [R, hidden_size] to float32 logits [R, its vocabulary]."""
        return self.head(hidden, adapters)

    def tensors(self) -> dict[str, Shard]:
        """Map each tensor name of a checkpoint to the part of it that this rank holds."""
        named = dict(self.embedding.tensors(EMBEDDING))
        for layer, block in zip(self.layers, self.blocks, strict=True):
            named.update(block.tensors(f"model.layers.{layer}."))
        named.update(self.norm.tensors("model.norm"))
        named.update(self.head.tensors())
        return named

    def make_room(self, room: AdapterRoom) -> dict[str, UpdatePlace]:
        """Allocate slots for adapters; returns where updates of each weight go.

        The head's is `lm_head` also where its weight is the embedding's: the two are updated apart.
        """
        size = (room.num_slots, room.max_rank)
        places: dict[str, UpdatePlace] = {}
        if self.layout.is_first_stage and EMBEDDING.rpartition(".")[2] in room.targets:
            self.embedding.make_room(*size)
            places[f"{EMBEDDING}.weight"] = self.embedding.place()
        for layer, block in zip(self.layers, self.blocks, strict=True):
            for prefix, linear in block.linears(f"model.layers.{layer}."):
                if not linear.parts.keys().isdisjoint(room.targets):
                    linear.make_room(*size)
                    places.update(linear.places(prefix))
        if self.layout.is_last_stage and HEAD in room.targets:
            self.head.linear.make_room(*size)
            ((_, place),) = self.head.linear.places("")
            places[f"{HEAD}.weight"] = place
        return places

    def make_invariant(self) -> None:
        """Let products give a row the same bits whichever rows are beside it, where kernels can."""
        for block in self.blocks:
            for _, linear in block.linears(""):
                linear.product = linear_invariant
        self.head.linear.product = linear_invariant

    @torch.inference_mode()
    def pack(self) -> None:
        """Pack every loaded weight for this machine; afterwards `tensors` has no meaning."""
        for block in self.blocks:
            block.attention.pack()
            block.mlp.pack()
        self.head.pack()
