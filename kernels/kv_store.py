"""Writing K and V of new tokens to their slots in paged memory.

Knows slots; knows nothing of who owns a page.
"""

from __future__ import annotations

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, kv_pages: Tensor, slots: Tensor) -> None:
    """Scatter K and V of the step's tokens into the pages of one layer, in place.

    key, value:  [num_tokens, num_kv_heads, head_dim]
    kv_pages:    [2, num_pages, page_size, num_kv_heads, head_dim]; 0 is K, 1 is V
    slots:       [num_tokens] int64, page_id * page_size + offset; two tokens share a slot only in
                 the dump page 0

    What is stored is always finite (NaN becomes 0, infinities the largest number). Attention
    multiplies slots past a row's end by a weight of 0; a NaN left there by one sequence would
    reach the next owner of the page.
    """
    store_kv_reference(key, value, kv_pages, slots)


def store_kv_reference(key: Tensor, value: Tensor, kv_pages: Tensor, slots: Tensor) -> None:
    """`store_kv` in torch."""
    flat = kv_pages.flatten(1, 2)
    flat[0].index_copy_(0, slots, key.nan_to_num())
    flat[1].index_copy_(0, slots, value.nan_to_num())
