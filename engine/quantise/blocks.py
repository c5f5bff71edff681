"""Runs calibration windows through a decoder, one block after another.

Only one block's weights exist at a time, in float32; the streams between blocks are kept. Blocks
may be changed between their passes. Knows nothing of how weights are rounded.

Legend: T tokens of a batch of windows, I inputs of a linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.attention.latent import PagedLatents
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.layers.linear import Linear
from remora.engine.layers.rotary import RotaryEmbedding
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import EMBEDDING, POSITIONS, DecoderBlock
from remora.engine.parallel.group import ALONE
from remora.engine.protocols import AttentionBackend, WeightSource
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope

TOKENS_AT_ONCE = 4096
PAGE_SIZE = 16
EXACT = torch.float32

Windows = Sequence[Sequence[int]]


class _Reached(Exception):
    """A pass has reached the linear whose inputs it records."""


class _OneLayer:
    """AttentionBackend with memory for one layer, which all layers use in turn."""

    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Attend as the only layer; see `protocols.AttentionBackend`."""
        return self._attention.attend(0, heads, rope, batch, spec)


class Calibration:
    """Windows of tokens on their way through the blocks.

    num_tokens:  of all windows
    """

    def __init__(self, config: DecoderConfig, windows: Windows, source: WeightSource) -> None:
        """Embed the windows.

        source:  with the model's names; only the embedding is read
        """
        self._config = config
        self._batches = [_batch(some) for some in _batched(windows)]
        self.num_tokens = sum(len(batch.token_ids) for batch in self._batches)
        tables = dict(source.read({f"{EMBEDDING}.weight", f"{POSITIONS}.weight"}))
        self._streams = [_embed(config, tables, batch) for batch in self._batches]
        self._attention = _OneLayer(_make_attention(config, self._batches))
        self._rotaries = {
            rope: RotaryEmbedding(rope, config.head_dim, device="cpu")
            for rope in {layer.rope for layer in config.layers}
        }

    def grams(self, layer: int, block: DecoderBlock, linears: Sequence[Linear]) -> list[Tensor]:
        """Return X^T X / T [I, I] of the inputs X of each linear of the block.

        A pass ends at the last one; linears that no window reaches have zeros.
        """
        found = [torch.zeros((len(linear.inputs.held),) * 2) for linear in linears]
        for linear, gram in zip(linears, found, strict=True):
            is_last = linear is linears[-1]
            linear.product = partial(_record, gram, is_last)
        try:
            for number in range(len(self._batches)):
                try:
                    self._run(layer, block, number)
                except _Reached:
                    continue
        finally:
            for linear in linears:
                del linear.product
        return [gram.div_(self.num_tokens) for gram in found]

    def advance(self, layer: int, block: DecoderBlock) -> None:
        """Replace the streams by what the block makes of them."""
        for number in range(len(self._batches)):
            self._streams[number] = self._run(layer, block, number)

    def _run(self, layer: int, block: DecoderBlock, number: int) -> Tensor:
        batch = self._batches[number]
        rotary = self._rotaries[self._config.layers[layer].rope]
        angles = rotary.angles(batch.positions, EXACT)
        stream = self._streams[number].clone()
        delta, stream = block(None, stream, angles, batch, self._attention, ALONE)
        return stream if delta is None else stream.add_(delta)


def _record(gram: Tensor, is_last: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    gram.addmm_(x.T, x)
    if is_last:
        raise _Reached
    return F.linear(x, weight, bias)


def _batched(windows: Windows) -> list[list[Sequence[int]]]:
    """Divide the windows into batches of up to TOKENS_AT_ONCE tokens."""
    batches: list[list[Sequence[int]]] = []
    size = TOKENS_AT_ONCE
    for window in windows:
        if size + len(window) > TOKENS_AT_ONCE:
            batches.append([])
            size = 0
        batches[-1].append(window)
        size += len(window)
    return batches


def _batch(windows: Windows) -> ForwardBatch:
    """Return the windows as rows that extend an empty context, each with pages of its own."""
    sizes = [len(window) for window in windows]
    pages = [-(-size // PAGE_SIZE) for size in sizes]
    firsts = [1, *(1 + end for end in accumulate(pages))]
    tables = torch.zeros(len(windows), max(pages), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(firsts, pages, strict=False)):
        tables[row, :count] = torch.arange(first, first + count)
    starts = (0, *accumulate(sizes))
    positions = [torch.arange(size) for size in sizes]
    slots = [first * PAGE_SIZE + at for first, at in zip(firsts, positions, strict=False)]
    return ForwardBatch(
        token_ids=torch.tensor([token for window in windows for token in window]),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        num_decodes=0,
        tables=tables,
        starts=torch.tensor(starts, dtype=torch.int32),
        lengths=torch.tensor(sizes, dtype=torch.int32),
        extend_starts=starts,
        extend_lens=tuple(sizes),
        logit_index=torch.empty(0, dtype=torch.int64),
    )


def _embed(config: DecoderConfig, tables: Mapping[str, Tensor], batch: ForwardBatch) -> Tensor:
    table = tables[f"{EMBEDDING}.weight"]
    stream = table[batch.token_ids].to(EXACT)
    if config.embedding.scale != 1.0:
        stream *= float(torch.tensor(config.embedding.scale, dtype=table.dtype))
    if config.embedding.num_positions:
        stream += tables[f"{POSITIONS}.weight"][batch.positions].to(EXACT)
    return stream


def _make_attention(config: DecoderConfig, batches: Sequence[ForwardBatch]) -> AttentionBackend:
    num_pages = max(int(batch.tables.max()) for batch in batches)
    latent = config.attention.latent
    if latent is not None:
        return PagedLatents(
            num_layers=1,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            row_size=latent.size + latent.rotary_size,
            latent_size=latent.size,
            dtype=EXACT,
            device="cpu",
        )
    return TorchAttention(
        num_layers=1,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=EXACT,
        device="cpu",
    )
