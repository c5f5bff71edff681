"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over pages of latents, absorbed.

A slot holds one vector for all heads: the latent of K and V, then the rotary part of K. Queries
are already multiplied with the up-projection of K, and the caller multiplies the result with that
of V, so the latent serves as both K and V.

With Triton the kernels are those of `gpu/attention/mla.py`.

Legend: D decode rows, T tokens, E rows, C elements of a latent, P rotary elements.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from remora.kernels.attention.split_plan import SplitPlan
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
    plan: SplitPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each decode token to the pages of its own row.

    query:        [D, num_heads, C + P], any token stride
    pages:        [num_pages, page_size, C + P] contiguous, in the format of `query`; slots past a
                  row's end may hold anything
    tables:       [D, max_pages] int32, any row stride; entries past a row's last page are not read
    lengths:      [D] int32, tokens of each row including the query's; length 0 yields zeros
    latent_size:  C
    scale:        the model's factor on q.k before softmax; does not follow from C + P
    fixed_split:  batch-invariant: a row's result does not depend on other rows
    plan:         from `plan_latent_splits` with the same arguments; None = it is made here
    out:          [D, num_heads, C] to overwrite, any token stride; None = new memory
    Returns [D, num_heads, C] in the format of `query`, `out` if given. Raises ValueError for
    incompatible queries and pages.
    """
    out = _checked(query, pages, latent_size, out)
    if not by_triton(query.device):
        return attend_latents_reference(query, pages, tables, lengths, scale=scale, out=out)
    if len(query) > 0:
        from remora.kernels.gpu.attention import mla as kernels

        plan = plan or kernels.plan(query, pages, tables, lengths, fixed_split=fixed_split)
        kernels.attend(query, pages, tables, out, scale=scale, plan=plan)
    return out


def plan_latent_splits(
    query: Tensor, pages: Tensor, tables: Tensor, lengths: Tensor, *, fixed_split: bool = False
) -> SplitPlan | None:
    """Divide the keys of rows for `attend_latents`; see `plan_splits`."""
    if not by_triton(query.device):
        return None
    from remora.kernels.gpu.attention import mla as kernels

    return kernels.plan(query, pages, tables, lengths, fixed_split=fixed_split)


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
    """Attend the last tokens of each row to all its tokens, causally.

    query:            [T, num_heads, C + P], any token stride
    pages, tables:    as in `attend_latents`; pages already hold the new tokens
    starts, lengths:  as in `attend_extend`
    out:              [T, num_heads, C] to overwrite, any token stride; None = new memory
    Returns [T, num_heads, C] in the format of `query`, `out` if given; tokens of no row are not
    written. Raises ValueError for incompatible queries and pages.
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
    """Return `out` or new memory for it. Raises ValueError for incompatible queries and pages."""
    size = query.shape[2]
    if pages.dtype != query.dtype:
        raise ValueError(f"pages of {pages.dtype} for queries of {query.dtype}")
    if pages.shape[2] != size or latent_size >= size:
        raise ValueError(
            f"queries of {size}, slots of {pages.shape[2]} and latents of {latent_size} elements "
            "do not fit together"
        )
    if not pages.is_contiguous() or query.stride()[1:] != (size, 1):
        raise ValueError("pages, and the heads of each query, must be contiguous")
    if out is None:
        out = query.new_empty((*query.shape[:2], latent_size))
    return out
