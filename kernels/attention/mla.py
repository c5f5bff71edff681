"""Attention over pages of latents: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434),
absorbed.

A slot holds one vector for all heads: the latent of K and V, then what of K is rotated. Queries
have been multiplied with the matrices that would make K of latents, and what comes out is yet to be
multiplied with those that make V: between the two, the latent is both K and V. Tokens are extended
the same way, so that a row reads the latents that it stores.

On a GPU the kernels are those of `gpu/attention_mla.py`, where there is triton. Legend: C elements
of a latent, P elements that are rotated.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton


def attend_latents(
    query: Tensor,
    pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    latent_size: int,
    scale: float,
    fixed_split: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each decode token to the pages of its own row.

    query:        [D, num_heads, C + P]; tokens may lie apart
    pages:        [num_pages, page_size, C + P], in the format of `query`, in one piece; slots past
                  a row's end may hold anything
    tables:       [D, max_pages] int32; rows may lie apart; entries past a row's last page are not
                  looked at
    lengths:      [D] int32, counted in tokens, the query's own included; a row of 0 gives zeros
    latent_size:  C
    scale:        factor on q.k before softmax; a model's, which does not follow from C + P
    fixed_split:  a row's result is the same bits whichever rows are beside it
    out:          [D, num_heads, C] to write to; tokens may lie apart
    Returns [D, num_heads, C] in the format of `query`, `out` if there is one. Raises ValueError for
    queries and pages that do not go together.
    """
    out = _checked(query, pages, latent_size, out)
    if not by_triton(query.device):
        return attend_latents_reference(query, pages, tables, lengths, scale=scale, out=out)
    if len(query) > 0:
        from remora.kernels.gpu.attention import mla as kernels

        kernels.attend(query, pages, tables, lengths, out, scale=scale, fixed_split=fixed_split)
    return out


def attend_latents_reference(
    query: Tensor, pages: Tensor, tables: Tensor, lengths: Tensor, *, scale: float, out: Tensor
) -> Tensor:
    """`attend_latents` in torch, row by row. Softmax in float32."""
    out.zero_()
    for row, length in enumerate(lengths.tolist()):
        rows = slice(row, row + 1)
        if length > 0:
            out[rows] = _attend_row(query[rows], pages, tables[row], length, scale, out.shape[2])
    return out


def extend_over_latents(
    query: Tensor,
    pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    latent_size: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each row's last tokens to everything before them and to themselves.

    query:    [T, num_heads, C + P]; tokens may lie apart
    pages:    as in `attend_latents`; the new tokens' are already there
    tables:   [E, max_pages] int32, as in `attend_latents`
    starts:   [E + 1] int32 ascending, each row's first token, then the end: rows may have no
              tokens, and tokens before the first or after the end are of no row
    lengths:  [E] int32, tokens of each row, the new ones included
    out:      [T, num_heads, C] to write to; tokens may lie apart
    Returns [T, num_heads, C] in the format of `query`, `out` if there is one; tokens of no row are
    not written. Raises ValueError for queries and pages that do not go together.
    """
    out = _checked(query, pages, latent_size, out)
    if not by_triton(query.device):
        return extend_over_latents_reference(
            query, pages, tables, starts, lengths, scale=scale, out=out
        )
    if len(query) > 0 and len(lengths) > 0:
        from remora.kernels.gpu.attention import mla as kernels

        kernels.extend(query, pages, tables, starts, lengths, out, scale=scale)
    return out


def extend_over_latents_reference(
    query: Tensor,
    pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    out: Tensor,
) -> Tensor:
    """`extend_over_latents` in torch, row by row. Softmax in float32."""
    for row, (start, stop) in enumerate(pairwise(starts.tolist())):
        if start < stop:
            out[start:stop] = _attend_row(
                query[start:stop], pages, tables[row], int(lengths[row]), scale, out.shape[2]
            )
    return out


def _attend_row(
    query: Tensor, pages: Tensor, table: Tensor, length: int, scale: float, latent_size: int
) -> Tensor:
    """Attend the last n tokens of a row, [n, num_heads, C + P]; returns [n, num_heads, C]."""
    exact = torch.promote_types(query.dtype, torch.float32)
    row_pages = table[: -(-length // pages.shape[1])].long()
    keys = pages[row_pages].flatten(0, 1)[:length].to(exact)
    scores = torch.einsum("nhe,se->nhs", query.to(exact), keys) * scale
    at = torch.arange(length, device=query.device)
    is_hidden = at > at[length - len(query) :].unsqueeze(1)
    weights = scores.masked_fill(is_hidden.unsqueeze(1), float("-inf")).softmax(-1)
    return torch.einsum("nhs,sc->nhc", weights, keys[:, :latent_size]).to(query.dtype)


def _checked(query: Tensor, pages: Tensor, latent_size: int, out: Tensor | None) -> Tensor:
    """Return where to write to, if queries and pages go together."""
    size = query.shape[2]
    if pages.dtype != query.dtype:
        raise ValueError(f"pages of {pages.dtype} for queries of {query.dtype}")
    if pages.shape[2] != size or latent_size >= size:
        raise ValueError(
            f"queries of {size} elements, pages of {pages.shape[2]}, latents of {latent_size}"
        )
    if not pages.is_contiguous() or query.stride()[1:] != (size, 1):
        raise ValueError("pages, and the heads of each query, must lie in one piece")
    if out is None:
        out = query.new_empty((*query.shape[:2], latent_size))
    return out
