"""The memory in which an attention backend keeps K and V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from remora.engine.attention.mixed import MixedAttention
from remora.engine.attention.windowed import WindowedAttention

_HELD = ("kv_pages", "scales", "pages")  # attributes of backends


def page_memory(attention: Any) -> Iterator[Tensor]:
    """Yield the tensors of a backend's pages and of their scales."""
    match attention:
        case WindowedAttention():
            yield from page_memory(attention.full)
            yield from page_memory(attention.windowed)
        case MixedAttention():
            for backend in attention.backends.values():
                yield from page_memory(backend)
    for name in _HELD:
        held = getattr(attention, name, None)
        if isinstance(held, Tensor):
            yield held
