"""A draft head's weights: one decoder layer, what joins its inputs, and their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.engine.layers.attention import SelfAttention
from remora.engine.layers.embedding import Head
from remora.engine.layers.linear import Linear
from remora.engine.layers.norm import Norm, make_norm
from remora.engine.layers.rotary import RotaryEmbedding
from remora.engine.models.checkpoint import QUANTIZATION, read_raw_config
from remora.engine.models.decoder import HEAD, LAST_NORM, DecoderBlock, DecoderModel
from remora.engine.models.load import open_stored
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import Fill, WeightSource
from remora.engine.spec.heads.config import (
    DRAFT_IDS,
    EMBEDDING_NORM,
    FC,
    HIDDEN_NORM,
    DraftHeadConfig,
)
from remora.engine.weights.formats.source import dequantised
from remora.engine.weights.loader import Filling
from remora.engine.weights.rename_tensors import RenamedWeights


class DraftHead:
    """A draft head, not loaded yet.

    decoder:         of one layer, without an embedding, and without an output head unless it has
                     its own
    fc:              from its joined inputs to the layer's
    embedding_norm, hidden_norm:  of its two inputs; None = they are not normalised
    draft_ids:       [draft vocabulary] the target's ids of its own; None = they are the same
    """

    draft_ids: Tensor | None = None

    def __init__(self, config: DraftHeadConfig, *, dtype: torch.dtype, device: str = "cpu") -> None:
        self.config = config
        size = config.decoder.hidden_size
        self.decoder = _make_decoder(config, dtype, device)
        inputs = config.state_size + (0 if config.kind == "eagle3" else size)

        def linear(inputs: int, parts: dict[str, Axis], *, bias: bool) -> Linear:
            return Linear(Axis.whole(inputs), parts, bias=bias, dtype=dtype, device=device)

        def norm() -> Norm | None:
            if config.kind == "eagle":
                return None
            return make_norm(config.decoder.block.norm, size, dtype=dtype, device=device)

        self.fc = linear(inputs, {FC: Axis.whole(size)}, bias=config.fc_bias)
        self.embedding_norm, self.hidden_norm = norm(), norm()
        if config.kind == "eagle3":  # attention reads both inputs
            attention = self.decoder.blocks[0].attention
            assert isinstance(attention, SelfAttention), "the layer is a Llama's"
            old = attention.linears()[0]
            attention.qkv_proj = linear(2 * size, old.parts, bias=old.bias is not None)

    @property
    def num_bytes(self) -> int:
        """The bytes of its weights."""
        return sum(shard.memory.nbytes for shard in self.tensors().values())

    def pack(self) -> None:
        """Convert the loaded weights to this machine's layout; `tensors` is invalid afterwards."""
        block = self.decoder.blocks[0]
        self.fc.pack()
        block.attention.pack()
        block.mlp.pack()
        if self.config.own_head:
            self.decoder.head.pack()

    def tensors(self) -> dict[str, Shard]:
        """Map the names of its tensors to their memory."""
        named = self.decoder.block_tensors(0)
        named |= dict(self.fc.tensors(""))
        for name, norm in (
            (EMBEDDING_NORM, self.embedding_norm),
            (HIDDEN_NORM, self.hidden_norm),
            (LAST_NORM, self.decoder.norm if self.config.own_norm else None),
        ):
            if norm is not None:
                named |= dict(norm.tensors(name))
        if self.config.own_head:
            named |= dict(self.decoder.head.tensors())
        return named


def _make_decoder(config: DraftHeadConfig, dtype: torch.dtype, device: str) -> DecoderModel:
    """Build a head's decoder; what is the target's has no memory."""
    own = config.decoder
    decoder = DecoderModel(own, dtype=dtype, device="meta")
    if device == "meta":
        return decoder
    decoder.blocks = [DecoderBlock(own, 0, dtype=dtype, device=device)]
    decoder.rotaries = [RotaryEmbedding(own.layers[0].rope, own.head_dim, device=device)]
    decoder.norm = make_norm(own.block.norm, own.hidden_size, dtype=dtype, device=device)
    if config.own_head:
        decoder.head = Head(
            HEAD,
            Axis.whole(own.vocab_size),
            own.hidden_size,
            tied=None,
            bias=own.head.bias,
            scale=own.head.scale,
            soft_cap=own.head.soft_cap,
            dtype=dtype,
            device=device,
        )
    return decoder


def open_stored_head(path: Path, loading: Loading) -> WeightSource:
    """Open the files of a head, with their names; quantised weights are dequantised."""
    is_pickled = not any(path.glob("*.safetensors"))
    source = open_stored(path, "pt" if is_pickled else "safetensors", loading)
    settings = read_raw_config(path).get(QUANTIZATION) or {}
    return dequantised(source, settings, torch.float32)


@contextmanager
def open_head(
    config: DraftHeadConfig,
    loading: Loading,
    *,
    dtype: torch.dtype,
    vocab_size: int,
    device: str = "cpu",
) -> Iterator[tuple[DraftHead, Fill]]:
    """Build a head and load it on demand, the rest at the end. Raises ConfigError.

    vocab_size:  of the target
    """
    head = DraftHead(config, dtype=dtype, device=device)
    source = open_stored_head(config.path, loading)
    if config.kind == "eagle3":
        for _, offsets in source.read([DRAFT_IDS]):
            head.draft_ids = torch.arange(len(offsets)) + offsets.long()
            _check_ids(config, head.draft_ids, vocab_size)
    renamed = RenamedWeights(source, config.rules)
    with Filling(head.tensors(), renamed, show_progress=False) as fill:
        yield head, fill


def _check_ids(config: DraftHeadConfig, ids: Tensor, vocab_size: int) -> None:
    size = config.decoder.vocab_size
    if ids.shape != (size,) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ConfigError(
            f"speculation.draft_model: {DRAFT_IDS} of {config.path} maps {tuple(ids.shape)} ids to "
            f"{int(ids.min())} to {int(ids.max())}; expected {size} ids of the model's {vocab_size}"
        )
