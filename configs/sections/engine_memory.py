"""How much memory the KV cache takes and how it is used: keys of the section `engine`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Bytes, PowerOfTwo, Section


class MemoryKeys(Section):
    """The KV cache."""

    page_size: Annotated[int, Field(ge=1, le=256), PowerOfTwo] = 16
    """Tokens per page of the KV cache, the unit of memory and of prefix reuse; a power of two."""

    kv_memory: Bytes | None = None
    """Memory of one replica's KV cache, in bytes or as 512MiB, 2GiB. Default: see mem_fraction."""

    kv_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Size of the KV cache in tokens, rounded down to pages; instead of kv_memory."""

    mem_fraction: Annotated[float, Field(gt=0, le=0.95)] | None = None
    """Share of the memory left beside the weights (on a GPU: and beside what a step needs, which is
    measured) that becomes KV cache when neither kv_memory nor kv_tokens is given; never more than
    max_running_requests sequences of full length. Default: 0.25 on a CPU, 0.9 on a GPU."""

    total_mem_fraction: Annotated[float, Field(gt=0, le=0.98)] | None = None
    """Share of the device's whole memory that weights, steps and KV cache may take together;
    instead of mem_fraction, and with several ranks on one device of all of them."""

    memory_reserve: Bytes | None = None
    """Memory of the device that is left to others, in bytes or as 2GiB. Default: none."""

    window_pages: Literal["auto", "off"] = "auto"
    """Whether layers with a sliding window have pages of their own and give them back behind it.
    auto = where contexts are longer than two windows (of a model with nothing but such layers: one)
    or where one of the next two is written; off = every token keeps room in all layers."""

    window_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Tokens that layers with a sliding window have room for, for each token of the other layers.
    Less of it leaves more memory to long sequences; one of n tokens needs no more than (window +
    prefill_chunk_tokens) / n. Default: 0.5; where all layers have a window, as long ones need."""

    window_saving: Annotated[float, Field(ge=0, le=1)] | None = None
    """Instead of window_ratio: how far it lies between 1, as many tokens as the other layers have
    (0), and what sequences of full length need (1)."""

    prefix_cache: bool = True
    """Whether the KV of a finished sequence is kept for prompts that begin alike."""

    prefix_eviction: Literal["lru", "lfu"] = "lru"
    """Which kept prefix leaves first when memory is needed: the one not used for longest, or the
    one found least often."""
