"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 differ only in their `DecoderConfig`.

Knows layers and the order of their parts. Knows nothing of files: `tensors` says which checkpoint
name fills which memory, and whoever loads writes there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from remora.engine.batch import ForwardBatch
from remora.engine.layers.attention import SelfAttention
from remora.engine.layers.embedding import Embedding, Head
from remora.engine.layers.mlp import GatedMLP
from remora.engine.layers.norm import RMSNorm
from remora.engine.layers.rotary import RotaryEmbedding
from remora.engine.models.config import DecoderConfig
from remora.engine.protocols import AttentionBackend


class DecoderBlock:
    """One layer: attention and feed-forward, each behind a norm."""

    def __init__(
        self, config: DecoderConfig, layer: int, *, dtype: torch.dtype, device: str
    ) -> None:
        self.attention_norm = RMSNorm(
            config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device
        )
        self.attention = SelfAttention(config, layer, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, dtype=dtype, device=device)

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        attention: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """Take what the layer before adds to the stream; return what this one adds, and the stream.

        delta, residual:  [num_tokens, hidden_size]; `residual` is overwritten
        """
        hidden, residual = self.attention_norm.add(delta, residual)
        hidden = self.attention(hidden, cos, sin, batch, attention)
        hidden, residual = self.mlp_norm.add(hidden, residual)
        return self.mlp(hidden), residual

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield each checkpoint name and the tensor that it fills."""
        yield from self.attention_norm.tensors(f"{prefix}input_layernorm")
        yield from self.attention.tensors(f"{prefix}self_attn.")
        yield from self.mlp_norm.tensors(f"{prefix}post_attention_layernorm")
        yield from self.mlp.tensors(f"{prefix}mlp.")


class DecoderModel:
    """A decoder whose memory is allocated; its weights are whatever was written to `tensors`."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: str) -> None:
        self.config = config
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device=device)
        self.blocks = [
            DecoderBlock(config, layer, dtype=dtype, device=device)
            for layer in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device)
        self.head = Head(self.embedding, tied=config.tied_embeddings)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the final hidden states [T, hidden_size] of the batch, after the last norm."""
        residual = self.embedding(batch.token_ids)
        cos, sin = self.rotary.angles(batch.positions, self.dtype)
        delta: Tensor | None = None
        for block in self.blocks:
            delta, residual = block(delta, residual, cos, sin, batch, attention)
        return self.norm.add(delta, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states [R, hidden_size] to float32 logits [R, vocab_size]."""
        return self.head(hidden)

    def tensors(self) -> dict[str, Tensor]:
        """Map each tensor name of a checkpoint to the memory that it fills."""
        named = dict(self.embedding.tensors("model.embed_tokens"))
        for layer, block in enumerate(self.blocks):
            named.update(block.tensors(f"model.layers.{layer}."))
        named.update(self.norm.tensors("model.norm"))
        named.update(self.head.tensors())
        return named

    @torch.inference_mode()
    def pack(self) -> None:
        """Pack every loaded weight for this machine; afterwards `tensors` has no meaning."""
        for block in self.blocks:
            block.attention.pack()
            block.mlp.pack()
        self.head.pack()
