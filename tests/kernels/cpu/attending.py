"""Sequences on the native paged cache, one step after the other, and what attention means."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.buffers import PagedCache
from remora.kernels.cpu.library import Format, KvFormat, Team
from remora.kernels.cpu.program import Program
from remora.kernels.kv_store import GREATEST, SCALE_DTYPE, quantise
from tests.kernels.cpu.products import GUARD, make_batch

MAX_TOKENS = 1024
MOST = {
    torch.float32: 3.3e38,
    torch.bfloat16: torch.finfo(torch.bfloat16).max,
    torch.float16: torch.finfo(torch.float16).max,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of attention.

    slope: slopes go from this to zero, head by head; None = there are none
    sink:  sinks go from this to its negative, head by head; None = there are none
    dtype: of K and V, unless they are quantised
    kv_dtype: of quantised K and V; None = they are not
    static: greatest magnitude of the first head that static scales do not clip; None = each token
            has scales of its own
    """

    num_kv_heads: int = 2
    heads_per_kv: int = 3
    head_dim: int = 16
    page_size: int = 16
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    sink: float | None = None
    slope: float | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    static: float | None = None

    @property
    def static_scales(self) -> Tensor | None:
        """Static scales of K and V [2, num_kv_heads], all different."""
        if self.static is None or self.kv_dtype is None:
            return None
        scales = self.static / GREATEST[self.kv_dtype] / torch.arange(1, 2 * self.num_kv_heads + 1)
        return scales.view(2, -1).to(SCALE_DTYPE)

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.heads_per_kv

    @property
    def sinks(self) -> Tensor | None:
        if self.sink is None:
            return None
        return torch.linspace(self.sink, -self.sink, self.num_heads)

    @property
    def slopes(self) -> Tensor | None:
        return None if self.slope is None else torch.linspace(self.slope, 0.0, self.num_heads)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def work_dtype(self) -> torch.dtype:
        """Of queries, weights and the output."""
        return torch.float32 if self.dtype == torch.float16 else self.dtype

    def draw(self, num_tokens: int, seed: int) -> Tensor:
        """Return q, k and v [num_tokens, heads, head_dim] of one sequence."""
        generator = torch.Generator().manual_seed(seed)
        heads = self.num_heads + 2 * self.num_kv_heads
        return torch.randn(num_tokens, heads, self.head_dim, generator=generator)

    def read(self, heads: Tensor, part: int = 0) -> Tensor:
        """Return K or V [tokens, heads, head_dim] as attention reads them, in float64.

        part:  1 = V, whose static scales are others
        """
        if self.kv_dtype is None:
            return heads.to(self.dtype).double()
        static = None if self.static_scales is None else self.static_scales[part]
        codes, scales = quantise(heads.nan_to_num(), self.kv_dtype, static)
        return codes.double() * scales.double().unsqueeze(-1)


class Attending:
    """One layer's cache and sequences by number; pages come in random order."""

    def __init__(
        self, team: Team, heads: Heads, *, num_sequences: int, seed: int = 0, garbage: float = 0.0
    ) -> None:
        self._heads = heads
        in_bytes = heads.dtype == torch.bfloat16 and heads.kv_dtype == torch.int8
        in_bytes = in_bytes and team.library.has_byte_products()
        self._width = 4 if in_bytes else 2 if heads.dtype == torch.bfloat16 else 1
        pages_each = -(-MAX_TOKENS // heads.page_size)
        num_pages = num_sequences * pages_each + 1
        shuffled = random.Random(seed).sample(range(1, num_pages), num_pages - 1)
        self.tables = torch.tensor(shuffled, dtype=torch.int32).view(num_sequences, pages_each)
        static = heads.static_scales
        self.cache = PagedCache.allocate(
            team,
            num_layers=2,
            num_pages=num_pages,
            page_size=heads.page_size,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            format=Format.of(heads.dtype),
            kv_format=KvFormat.of(heads.kv_dtype),
            static_scales=None if static is None else torch.stack((2 * static, static)),
        )
        if heads.kv_dtype is not None:
            code = torch.tensor(GREATEST[heads.kv_dtype] if garbage else 0.0).to(heads.kv_dtype)
            self.cache.data.copy_(code.view(torch.uint8))
        else:
            self.cache.data.view(heads.dtype).fill_(garbage)
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self._qkv = torch.zeros(MAX_TOKENS, width + 5)
        out_width = heads.num_heads * heads.head_dim
        self._out = torch.empty(MAX_TOKENS + 1, out_width + 3, dtype=heads.work_dtype)
        self._batch = make_batch(MAX_TOKENS, num_sequences, self.tables)
        self._program = self._make_program(team)
        self._lens = [0] * num_sequences

    def _make_program(self, team: Team) -> Program:
        heads, half = self._heads, self._heads.head_dim // 2
        program = Program(team, self._batch)
        program.rotate_and_store(
            self._qkv,
            self.cache,
            1,
            num_heads=heads.num_heads,
            cosines=torch.ones(MAX_TOKENS, half),
            sines=torch.zeros(MAX_TOKENS, half),
        )
        program.attend(
            self._qkv,
            self.cache,
            1,
            self._out,
            num_heads=heads.num_heads,
            scale=heads.scale,
            window=heads.window,
            chunked=heads.chunked,
            soft_cap=heads.soft_cap,
            sinks=heads.sinks,
            slopes=heads.slopes,
        )
        return program

    def step(self, chunks: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Append q, k and v [n, heads, head_dim] to sequences; return [n, num_heads, head_dim]."""
        batch, at = self._batch, 0
        for place, (sequence, chunk) in enumerate(chunks.items()):
            positions = torch.arange(self._lens[sequence], self._lens[sequence] + len(chunk))
            pages = self.tables[sequence][positions // self._heads.page_size]
            stop = at + len(chunk)
            self._qkv[at:stop, : chunk[0].numel()] = chunk.flatten(1)
            batch.positions[at:stop] = positions.numpy()
            slots = pages * self._heads.page_size + positions % self._heads.page_size
            batch.slots[at:stop] = slots.numpy()
            batch.starts[place : place + 2] = at, stop
            batch.table_rows[place] = sequence
            self._lens[sequence] += len(chunk)
            batch.lengths[place] = self._lens[sequence]
            at = stop
        self._out[: at + 1] = GUARD
        self._program.run(at, len(chunks), 0)
        return self._read(chunks, at)

    def _read(self, chunks: Mapping[int, Tensor], num_tokens: int) -> dict[int, Tensor]:
        width = self._heads.num_heads * self._heads.head_dim
        guard = torch.tensor(GUARD, dtype=self._heads.work_dtype)
        assert (self._out[num_tokens] == guard).all(), "the row after the last was written to"
        assert (self._out[:num_tokens, width:] == guard).all(), "columns were written to"
        shape = (num_tokens, self._heads.num_heads, self._heads.head_dim)
        heads = self._out[:num_tokens, :width].view(shape)
        parts = torch.split(heads.clone(), [len(chunk) for chunk in chunks.values()] or [0])
        return dict(zip(chunks, parts, strict=bool(chunks)))

    def stored(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Read K and V [tokens, num_kv_heads, head_dim] back as src/attention.h lays them out.

        Quantised ones are multiplied by their scales, in float64.
        """
        heads, size, width = self._heads, self._heads.page_size, self._width
        padded = -(-heads.head_dim // 16) * 16
        num_pages = -(-self._lens[sequence] // size)
        pages = self.cache.data[1][self.tables[sequence, :num_pages].long()]
        pages = pages.view(num_pages, heads.num_kv_heads, -1)
        dtype = heads.kv_dtype or heads.dtype
        num_bytes = 2 * size * padded * dtype.itemsize
        halves = pages[:, :, :num_bytes].contiguous().view(dtype)
        halves = halves.view(num_pages, heads.num_kv_heads, 2, size // 16, 16 * padded)
        keys = halves[:, :, 0].view(num_pages, -1, size // 16, padded // width, 16, width)
        values = halves[:, :, 1].view(num_pages, -1, size // 16, 16 // width, padded, width)
        stored = (
            self._in_order(keys.permute(0, 2, 4, 1, 3, 5), sequence),
            self._in_order(values.permute(0, 2, 3, 5, 1, 4), sequence),
        )
        if heads.kv_dtype is None:
            assert pages.shape[2] == num_bytes
            return stored
        scales = pages[:, :, num_bytes:].contiguous().view(torch.bfloat16)
        scales = scales.view(num_pages, -1, 2, size).permute(2, 0, 3, 1).flatten(1, 2)
        scales = scales[:, : self._lens[sequence], :, None].double()
        return stored[0].double() * scales[0], stored[1].double() * scales[1]

    def _in_order(self, tokens_first: Tensor, sequence: int) -> Tensor:
        heads = self._heads
        flat = tokens_first.flatten(4) if tokens_first.dim() == 6 else tokens_first
        rows = flat.reshape(-1, heads.num_kv_heads, -(-heads.head_dim // 16) * 16)
        return rows[: self._lens[sequence], :, : heads.head_dim]


def attend_densely(heads: Heads, qkv: Tensor) -> Tensor:
    """Attend every token of one sequence to those before it, in float64."""
    ends = (heads.num_heads, heads.num_heads + heads.num_kv_heads)
    query, key, value = qkv.tensor_split(ends, dim=1)
    query = query.to(heads.work_dtype).double()
    key, value = heads.read(key, 0), heads.read(value, 1)
    key = key.repeat_interleave(heads.heads_per_kv, 1)
    value = value.repeat_interleave(heads.heads_per_kv, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * heads.scale
    if heads.soft_cap is not None:
        scores = heads.soft_cap * torch.tanh(scores / heads.soft_cap)
    at = torch.arange(len(qkv))
    if heads.slopes is not None:
        scores += heads.slopes.double()[:, None, None] * (at[None, :] - at[:, None])
    hidden = at[None, :] > at[:, None]
    if heads.window is not None and heads.chunked:
        hidden |= at[None, :] < at[:, None] // heads.window * heads.window
    elif heads.window is not None:
        hidden |= at[None, :] <= at[:, None] - heads.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.double()[:, None, None].expand(-1, len(qkv), 1)
        scores = torch.cat((scores, sinks), dim=2)
    weights = scores.softmax(-1)[:, :, : len(qkv)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def run_in_chunks(
    team: Team, heads: Heads, qkv: Tensor, chunks: Sequence[int], *, seed: int = 0
) -> Tensor:
    """Attend one sequence alone, chunk after chunk."""
    attending = Attending(team, heads, num_sequences=1, seed=seed)
    return torch.cat([attending.step({0: part})[0] for part in torch.split(qkv, list(chunks))])
