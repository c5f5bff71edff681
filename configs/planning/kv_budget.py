"""Size the KV pool.

Knows bytes and pages, and nothing of models: the caller passes the bytes of a page. Every error
contains the numbers that decide, and settings that would work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig

# A CPU's memory is shared with other programs; a GPU serves the model only.
_MEM_FRACTIONS = {"cpu": 0.25, "cuda": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of a device.

    weight_bytes:     of one rank
    available_bytes:  free memory of the device before weights are loaded
    total_bytes:      total memory of the device
    step_bytes:       further memory of a step, if measured
    """

    weight_bytes: int
    available_bytes: int
    total_bytes: int
    device: str
    step_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Memory that is not for the KV cache."""
        return self.weight_bytes + self.step_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Bytes of a draft model, which uses the same pages as the model that it drafts for.

    token_bytes:  KV of one token
    """

    weight_bytes: int = 0
    token_bytes: int = 0


NOTHING_RESERVED = Reserved()


def size_kv_pool(
    config: ServeConfig, budget: Budget, *, page_bytes: int, most_useful_pages: int
) -> int:
    """Return the pages of one replica's KV pool, not counting the dump page. Raises ConfigError.

    page_bytes:         of one rank; each rank has its part of every page
    most_useful_pages:  upper bound, the most that sequences can use at once
    """
    engine, fixed_bytes = config.engine, budget.fixed_bytes
    unreserved_bytes = max(budget.available_bytes - (engine.memory_reserve or 0), 0)
    available_bytes = unreserved_bytes // _num_sharers(config)
    if engine.kv_tokens is not None:
        num_pages = engine.kv_tokens // engine.page_size
    elif engine.kv_memory is not None:
        num_pages = engine.kv_memory // (page_bytes * config.parallel.num_ranks) - 1
    else:
        left_bytes = max(available_bytes - fixed_bytes, 0)
        if engine.total_mem_fraction is None:
            share_bytes = int(left_bytes * _mem_fraction(config, budget.device))
        else:
            whole_bytes = int(budget.total_bytes * engine.total_mem_fraction)
            share_bytes = min(whole_bytes // _num_sharers(config) - fixed_bytes, left_bytes)
        num_pages = min(share_bytes // page_bytes - 1, most_useful_pages)
    kv_bytes = (max(num_pages, 1) + 1) * page_bytes
    if fixed_bytes + kv_bytes > available_bytes:
        own = replace(budget, available_bytes=available_bytes)
        raise ConfigError(_does_not_fit(config, own, kv_bytes, page_bytes))
    _check_one_sequence_fits(config, num_pages, page_bytes, budget.device)
    return num_pages


def _mem_fraction(config: ServeConfig, device: str) -> float:
    """Return the fraction of the memory left after the weights that becomes KV cache."""
    return config.engine.mem_fraction or _MEM_FRACTIONS[device]


def _share(config: ServeConfig, device: str) -> str:
    whole = config.engine.total_mem_fraction
    if whole is not None:
        return f"what the weights leave of engine.total_mem_fraction = {whole} of the memory"
    return f"the share engine.mem_fraction = {_mem_fraction(config, device)} of the free memory"


def max_replicas(config: ServeConfig) -> int:
    """Return the most replicas that can run at once."""
    return config.autoscaling.max_replicas or config.parallel.num_replicas


def ranks_on_machine(config: ServeConfig) -> int:
    """Return the ranks that share this machine, including those of other replicas."""
    parallel = config.parallel
    return max_replicas(config) * (parallel.num_ranks // parallel.num_nodes)


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Return the pages for `num_tokens` tokens of one sequence."""
    return -(-num_tokens // page_size)


def human_bytes(num_bytes: int) -> str:
    """Format bytes in the largest binary unit of which there is at least 1, to two places."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{num_bytes} B"


def _writable_size(num_bytes: int, *, round_up: bool) -> str:
    """Format a value for engine.kv_memory: whole MiB, or whole KiB below 16 MiB."""
    unit, size = ("MiB", 2**20) if num_bytes >= 16 * 2**20 else ("KiB", 2**10)
    return f"{-(-num_bytes // size) if round_up else num_bytes // size}{unit}"


def _num_sharers(config: ServeConfig) -> int:
    """Return how many ranks share the device's memory; with cuda, Ray reserves a GPU for each."""
    return 1 if config.engine.device == "cuda" else ranks_on_machine(config)


def _describe_sharers(config: ServeConfig) -> str:
    """Return the end of `4 GiB are available ...`: what the memory was divided by."""
    replicas, ranks = max_replicas(config), ranks_on_machine(config)
    if _num_sharers(config) == 1:
        return ""
    if ranks == replicas:
        return f" for each of {replicas} replicas"
    if replicas == 1:
        return f" for each of {ranks} ranks"
    return f" for each of {ranks // replicas} ranks of {replicas} replicas"


def _does_not_fit(config: ServeConfig, own: Budget, kv_bytes: int, page_bytes: int) -> str:
    """Return the message that weights and KV exceed the memory, with settings that would fit.

    own:  of one rank
    """
    replicas = max_replicas(config)
    left_bytes = own.available_bytes - own.fixed_bytes
    fitting_pages = left_bytes // page_bytes - 1
    advice = []
    if fitting_pages >= 1:
        written = _writable_size(left_bytes * config.parallel.num_ranks, round_up=False)
        num_tokens = fitting_pages * config.engine.page_size
        advice.append(f"engine.kv_memory up to {written}, or engine.kv_tokens up to {num_tokens}")
    if config.engine.memory_reserve:
        reserved = human_bytes(config.engine.memory_reserve)
        advice.append(f"engine.memory_reserve below {reserved}")
    if own.step_bytes:
        advice.append("a smaller engine.max_step_tokens or max_running_requests")
    if config.model.dtype == "float32":
        advice.append("model.dtype bfloat16, which halves both")
    if replicas > 1 and _num_sharers(config) > 1:
        key = "autoscaling.max_replicas" if config.autoscaling.is_on else "parallel.num_replicas"
        advice.append(f"{key} below {replicas}")
    if own.device != "cpu" and config.offload.key is None:
        advice.append("offload.host_memory, which keeps weights of layers in host memory")
    advice.append("fewer other programs on this machine, or a smaller model")
    of_rank = " of a rank" if config.parallel.num_ranks > 1 else ""
    steps = f", step buffers ({human_bytes(own.step_bytes)})" if own.step_bytes else ""
    return (
        f"weights ({human_bytes(own.weight_bytes)}){steps} and KV cache ({human_bytes(kv_bytes)})"
        f"{of_rank} need {human_bytes(own.fixed_bytes + kv_bytes)}; "
        f"{human_bytes(own.available_bytes)} are available{_describe_sharers(config)}, "
        f"{human_bytes(kv_bytes - left_bytes)} too few. Options: {'; '.join(advice)}"
    )


def _check_one_sequence_fits(
    config: ServeConfig, num_pages: int, page_bytes: int, device: str
) -> None:
    """Refuse a pool without pages, or smaller than a written context length.

    A pool smaller than the model's own context is allowed, and limits the length of a sequence.
    """
    engine = config.engine
    wanted_tokens = config.model.context_length or 1
    wanted_pages = pages_needed(wanted_tokens, engine.page_size)
    if num_pages >= wanted_pages:
        return
    wanted_bytes = (wanted_pages + 1) * page_bytes * config.parallel.num_ranks
    if engine.kv_tokens is not None:
        found = f"engine.kv_tokens = {engine.kv_tokens}"
        advice = f"engine.kv_tokens to at least {wanted_pages * engine.page_size}"
    else:
        given = f"engine.kv_memory = {human_bytes(engine.kv_memory)}" if engine.kv_memory else ""
        found = given or _share(config, device)
        advice = f"engine.kv_memory to at least {_writable_size(wanted_bytes, round_up=True)}"
    held_tokens = max(num_pages, 0) * engine.page_size
    if held_tokens:
        advice += f", or model.context_length to at most {held_tokens}"
    raise ConfigError(
        f"{found} holds {held_tokens} tokens in pages of {engine.page_size}; one sequence of "
        f"{wanted_tokens} needs {human_bytes(wanted_bytes)}: set {advice}"
    )
