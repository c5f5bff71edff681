"""How large the KV pool becomes, and what to do when it cannot.

Knows bytes and pages. Knows nothing of models: the caller says what a page costs. Every refusal
carries the numbers it was decided by and settings that would pass.
"""

from __future__ import annotations

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig


def size_kv_pool(
    config: ServeConfig,
    *,
    page_bytes: int,
    weight_bytes: int,
    available_bytes: int,
    most_useful_pages: int,
) -> int:
    """Return the pages of the KV pool of one replica, the dump page not counted.

    available_bytes:    for one replica, before its weights are loaded
    most_useful_pages:  more than this could never be held at once
    The memory taken is one page more than returned: the dump page.
    """
    engine = config.engine
    if engine.kv_tokens is not None:
        num_pages = engine.kv_tokens // engine.page_size
    elif engine.kv_memory is not None:
        num_pages = engine.kv_memory // page_bytes - 1
    else:
        share_bytes = int(max(available_bytes - weight_bytes, 0) * engine.mem_fraction)
        num_pages = min(share_bytes // page_bytes - 1, most_useful_pages)
    needed_bytes = weight_bytes + (max(num_pages, 1) + 1) * page_bytes
    if needed_bytes > available_bytes:
        raise ConfigError(
            _does_not_fit(config, weight_bytes, needed_bytes, available_bytes, page_bytes)
        )
    _check_one_sequence_fits(config, num_pages, page_bytes)
    return num_pages


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Return the pages that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // page_size)


def human_bytes(num_bytes: int) -> str:
    """Return bytes in the largest binary unit that leaves at least 1, to two places."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{num_bytes} B"


def _writable_size(num_bytes: int, *, round_up: bool) -> str:
    """Return a value for engine.kv_memory: whole MiB, or whole KiB where that is too coarse."""
    unit, size = ("MiB", 2**20) if num_bytes >= 16 * 2**20 else ("KiB", 2**10)
    return f"{-(-num_bytes // size) if round_up else num_bytes // size}{unit}"


def _does_not_fit(
    config: ServeConfig, weight_bytes: int, needed_bytes: int, available_bytes: int, page_bytes: int
) -> str:
    """Say by how much weights and KV exceed the memory, and which settings would fit."""
    num_replicas = config.parallel.num_replicas
    left_bytes = available_bytes - weight_bytes
    fitting_pages = left_bytes // page_bytes - 1
    advice = []
    if fitting_pages >= 1:
        written = _writable_size(left_bytes, round_up=False)
        num_tokens = fitting_pages * config.engine.page_size
        advice.append(f"engine.kv_memory up to {written}, or engine.kv_tokens up to {num_tokens}")
    if config.model.dtype == "float32":
        advice.append("model.dtype bfloat16, which halves both")
    if num_replicas > 1:
        advice.append(f"parallel.num_replicas below {num_replicas}")
    advice.append("fewer other programs on this machine, or a smaller model")
    each = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
    return (
        f"weights ({human_bytes(weight_bytes)}) and KV cache "
        f"({human_bytes(needed_bytes - weight_bytes)}) need {human_bytes(needed_bytes)}; "
        f"available are {human_bytes(available_bytes)}{each}, "
        f"{human_bytes(needed_bytes - available_bytes)} too few. "
        f"What would help: {'; '.join(advice)}"
    )


def _check_one_sequence_fits(config: ServeConfig, num_pages: int, page_bytes: int) -> None:
    """Refuse a pool without a page, or below the context length where that was written.

    A pool below the model's own context is allowed: it caps what one sequence can have.
    """
    engine = config.engine
    wanted_tokens = config.model.context_length or 1
    wanted_pages = pages_needed(wanted_tokens, engine.page_size)
    if num_pages >= wanted_pages:
        return
    wanted_bytes = (wanted_pages + 1) * page_bytes
    if engine.kv_tokens is not None:
        found = f"engine.kv_tokens = {engine.kv_tokens}"
        advice = f"engine.kv_tokens to at least {wanted_pages * engine.page_size}"
    else:
        given = f"engine.kv_memory = {human_bytes(engine.kv_memory)}" if engine.kv_memory else ""
        found = given or f"the share engine.mem_fraction = {engine.mem_fraction} of the free memory"
        advice = f"engine.kv_memory to at least {_writable_size(wanted_bytes, round_up=True)}"
    held_tokens = max(num_pages, 0) * engine.page_size
    if held_tokens:
        advice += f", or model.context_length to at most {held_tokens}"
    raise ConfigError(
        f"{found} holds {held_tokens} tokens in pages of {engine.page_size}; one sequence of "
        f"{wanted_tokens} needs {human_bytes(wanted_bytes)}: set {advice}"
    )
