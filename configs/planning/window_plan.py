"""Size the KV pools of models with sliding-window layers.

Full-attention layers keep every token of a sequence; sliding-window layers need the last `window`
tokens and those of a step. Either both kinds have separate pools, which share the memory by a
ratio, or every page stores all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.planning.kv_budget import Budget, most_useful_pages, pages_needed, size_kv_pool
from remora.configs.planning.shares import share
from remora.configs.schema import ServeConfig

# Tokens of window layers per token of the others. Sequences of two windows or more gain from it.
DEFAULT_RATIO = 0.5
MIN_WINDOWS = 2  # in shorter contexts, the gain of long sequences does not offset the loss of short


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRoom:
    """Pages of the sliding-window layers.

    layers:     [num_layers] whether each has a window
    window:     tokens in the widest window, including the newest
    num_pages:  not counting the dump page
    row_pages:  most pages of one sequence at a time
    """

    layers: tuple[bool, ...]
    window: int
    num_pages: int
    row_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPools:
    """KV memory of the rank with the most."""

    num_pages: int
    kv_bytes: int
    windows: WindowRoom | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLimits:
    """Limits of sequences that size the pools.

    layer_bytes:   of one token in each layer, on the rank with the most
    ahead_tokens:  most tokens of one sequence in the steps in flight
    reserved_bytes:  of one token in a draft model, which shares the pages
    """

    layer_bytes: Sequence[int]
    max_running: int
    max_model_len: int
    ahead_tokens: int
    reserved_bytes: int = 0


def size_pools(config: ServeConfig, model: ModelFacts, limits: KVLimits, budget: Budget) -> KVPools:
    """Return the KV pools. Raises ConfigError, with settings that would work."""
    ratio = _ratio(config, model, limits)
    if ratio is not None:
        pools = _apart(config, model, limits, budget, ratio)
        if pools is not None:
            return pools
    stages = [(sum(limits.layer_bytes[at] for at in held), 0) for held in _stages(config, model)]
    return _pools(config, limits, budget, stages, 0.0, None)


def _written(config: ServeConfig) -> str | None:
    """Return the written key that requires separate pools, or None."""
    for key in ("window_ratio", "window_saving"):
        value = getattr(config.engine, key)
        if value is not None:
            return f"engine.{key} = {value}"
    return None


def _ratio(config: ServeConfig, model: ModelFacts, limits: KVLimits) -> float | None:
    """Return the ratio of separate pools; None = all layers share pages."""
    engine, window, written = config.engine, max_window(model), _written(config)
    if window is None or limits.max_model_len <= window:
        if written is not None:
            reason = (
                "the model has no layers with a sliding window"
                if window is None
                else f"a sequence has at most {limits.max_model_len} tokens, and the window of the "
                f"model's layers is {window}"
            )
            raise ConfigError(f"{written}: {reason}; leave it out")
        return None
    row_pages = _row_pages(window, limits, engine.page_size)
    least = min(1.0, row_pages / pages_needed(limits.max_model_len, engine.page_size))
    if engine.window_ratio is not None:
        return engine.window_ratio
    if engine.window_saving is not None:
        return 1 - engine.window_saving * (1 - least)
    if engine.window_pages == "off" or least == 1:
        return None
    if None not in model.windows:
        return least  # there are no other layers
    return max(DEFAULT_RATIO, least) if limits.max_model_len > MIN_WINDOWS * window else None


def _apart(
    config: ServeConfig, model: ModelFacts, limits: KVLimits, budget: Budget, ratio: float
) -> KVPools | None:
    """Size separate pools; None if one sequence does not fit and no key requires them."""
    window = max_window(model)
    assert window is not None, "a ratio exists only for models with windows"
    windowed = tuple(each is not None for each in model.windows)
    full, apart = (
        [
            size if each == is_apart else 0
            for size, each in zip(limits.layer_bytes, windowed, strict=True)
        ]
        for is_apart in (False, True)
    )
    stages = [
        (sum(full[at] for at in held), sum(apart[at] for at in held))
        for held in _stages(config, model)
    ]
    page_size = config.engine.page_size
    row_pages = _row_pages(window, limits, page_size)
    room = WindowRoom(layers=windowed, window=window, num_pages=0, row_pages=row_pages)
    pools = _pools(config, limits, budget, stages, ratio, room)
    made = pools.windows
    assert made is not None
    longest = min(pools.num_pages, pages_needed(limits.max_model_len, page_size))
    needed = min(row_pages, longest)
    if made.num_pages >= needed:
        return pools
    written = _written(config)
    if written is None:
        return None
    raise ConfigError(
        f"{written}: leaves {max(made.num_pages, 0) * page_size} tokens for the sliding-window "
        f"layers, and one sequence needs {needed * page_size} (a window of {window}, and "
        f"{limits.ahead_tokens} computed at a time); leave it out, reduce "
        "engine.prefill_chunk_tokens, or give the KV cache more memory"
    )


def _pools(
    config: ServeConfig,
    limits: KVLimits,
    budget: Budget,
    stages: list[tuple[int, int]],
    ratio: float,
    room: WindowRoom | None,
) -> KVPools:
    """Size the pools.

    stages:  bytes of a token in layers that share pages or have no window, and in window layers
    """
    page_size = config.engine.page_size
    stages = [(full + limits.reserved_bytes, apart) for full, apart in stages]
    num_pages = size_kv_pool(
        config,
        budget,
        page_bytes=max(1, *(round(page_size * (full + ratio * apart)) for full, apart in stages)),
        most_useful_pages=most_useful_pages(
            config, budget.device, max_running=limits.max_running, max_len=limits.max_model_len
        ),
    )
    if room is not None:
        room = replace(room, num_pages=int((num_pages + 1) * ratio) - 1)
    apart_pages = 0 if room is None else room.num_pages + 1
    return KVPools(
        num_pages=num_pages,
        kv_bytes=page_size
        * max(full * (num_pages + 1) + apart * apart_pages for full, apart in stages),
        windows=room,
    )


def max_window(model: ModelFacts) -> int | None:
    """Return the widest window of the model's layers, if they have any."""
    return max((window for window in model.windows if window is not None), default=None)


def _row_pages(window: int, limits: KVLimits, page_size: int) -> int:
    return pages_needed(window + limits.ahead_tokens, page_size) + 1


def _stages(config: ServeConfig, model: ModelFacts) -> list[range]:
    pp_size = config.parallel.pp_size
    return [share(model.num_layers, stage, pp_size) for stage in range(pp_size)]
