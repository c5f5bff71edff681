"""Attention over latents as operations of a step program.

Knows how queries and latents are made, rotated, stored and attended; nothing of the surrounding
layer.

Legend: T tokens of a step, N heads, C elements of a latent, P elements that are rotated, D elements
of a head that are not, V elements of a head's value.
"""

from __future__ import annotations

from torch import Tensor

from remora.engine.graphs import step_norms
from remora.engine.graphs.operands import Operand, RowBuffers, allocate_floats, whole_panels
from remora.engine.graphs.step_products import Products
from remora.engine.layers.latent_attention import LatentAttention
from remora.engine.models.config import DecoderConfig
from remora.kernels.cpu.buffers import PagedCache, Rows
from remora.kernels.cpu.latents import join_heads, join_latents, multiply_heads
from remora.kernels.cpu.library import PANEL, Format
from remora.kernels.cpu.packing import PackedWeight, pack
from remora.kernels.cpu.program import Program
from remora.kernels.memory import Arena


class LatentSteps:
    """Adds the attention of layers, which share its memory.

    The cache holds each token's latent twice, as K and as V, because attention's two products read
    it in different orders.
    """

    def __init__(
        self,
        program: Program,
        config: DecoderConfig,
        *,
        max_tokens: int,
        plain: Format,
        arena: Arena,
        products: Products,
    ) -> None:
        """See `add`.

        plain:  of per-head weights, which are not quantised
        """
        latent = config.attention.latent
        assert latent is not None
        self._program, self._latent, self._num_heads = program, latent, config.num_heads
        self._arena, self._products = arena, products
        team, heads = program.team, config.num_heads
        self._row = latent.size + latent.rotary_size
        self._query_size = heads * (latent.key_size + latent.rotary_size)
        self._steps = whole_panels(latent.size), whole_panels(latent.value_size)
        self._plain = plain
        first = latent.query_rank or self._query_size

        def rows(size: int) -> Rows:
            return Rows.allocate(team, self._plain, max_tokens, whole_panels(size))

        self._made = allocate_floats(max_tokens, first + self._row + PANEL)
        self._kept = self._made[:, first : first + self._row]
        self._query = self._made
        if latent.query_rank is not None:
            self._narrow = RowBuffers(team, max_tokens, latent.query_rank)
            self._query = allocate_floats(max_tokens, self._query_size)
        self._query_rows = rows(self._query_size)
        self._absorbed = allocate_floats(max_tokens, heads * self._steps[0])
        self._heads = allocate_floats(max_tokens, (heads + 1) * self._row)
        self._attended = rows(heads * self._row)
        self._values = allocate_floats(max_tokens, heads * self._steps[1])
        self._joined = RowBuffers(team, max_tokens, heads * latent.value_size)

    def add(
        self,
        attention: LatentAttention,
        hidden: Operand,
        cache: PagedCache,
        place: int,
        angles: tuple[Tensor, Tensor],
    ) -> tuple[Operand, int]:
        """Add attention up to its last product.

        hidden:  [T, hidden_size]
        place:   layer index in the cache
        angles:  cosines and sines [positions, P / 2] float32
        Returns the input of the last product, and the bytes of weights that are read here, without
        those of `multiply`.
        """
        program, latent, num_heads = self._program, self._latent, self._num_heads
        products = self._products
        products.add(hidden, attention.in_proj, self._made)
        if attention.q_norm is not None and attention.q_b_proj is not None:
            norm = step_norms.of_rows(attention.q_norm, residual_scale=1.0)
            narrow = self._narrow.operand(products.formats(attention.q_b_proj))
            program.norm(self._made, norm, narrow.written)
            products.add(narrow, attention.q_b_proj, self._query)
        make_keys, make_values = self._pack_heads(attention)

        program.round(self._query, self._query_size, self._query_rows)
        step = latent.key_size + latent.rotary_size
        to_latents, to_values = self._steps
        multiply_heads(program, self._query_rows, step, make_keys, self._absorbed, to_latents)
        join_latents(
            program,
            self._absorbed,
            to_latents,
            self._query,
            self._kept,
            step_norms.of_rows(attention.latent_norm, residual_scale=1.0),
            self._heads,
            num_heads=num_heads,
            key_size=latent.key_size,
            rotary_size=latent.rotary_size,
        )
        cosines, sines = angles
        program.rotate_and_store(
            self._heads,
            cache,
            place,
            num_heads=num_heads,
            cosines=cosines,
            sines=sines,
            first=latent.size,
            interleaved=attention.interleaved,
            keys_are_values=True,
        )
        program.attend(
            self._heads,
            cache,
            place,
            self._attended.values,
            num_heads=num_heads,
            scale=attention.spec.scale,
            window=attention.spec.window,
        )
        multiply_heads(program, self._attended, self._row, make_values, self._values, to_values)
        joined = self._joined.operand(products.formats(attention.o_proj))
        size = latent.value_size
        join_heads(program, self._values, to_values, num_heads, size, joined.written)
        return joined, sum(weight.num_bytes for weight in (*make_keys, *make_values))

    def _pack_heads(
        self, attention: LatentAttention
    ) -> tuple[list[PackedWeight], list[PackedWeight]]:
        """Return each head's weights that absorb queries and that make values."""
        unfold, size = attention.release(), self._latent.key_size

        def packed(weight: Tensor) -> PackedWeight:
            return pack(self._program.team, weight, None, self._plain, self._arena)

        return [packed(each[:size].T) for each in unfold], [packed(each[size:]) for each in unfold]
