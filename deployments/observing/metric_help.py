"""HELP texts of the metrics that are exported straight from statistics.

Keys are metric names without the prefix `remora_`. The statistics are those of the engine
(`EngineStats`), of compiled grammars (`GrammarStats`) and of the adapter cache
(`AdapterCache.stats`). Texts of metrics that the HTTP layer observes are where it observes them.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENGINE = {
    "num_running": "Sequences that have a row in the engine's batch.",
    "num_waiting": "Sequences that wait in the engine's queue for a row or for KV pages.",
    "num_queued_tokens": "Prompt tokens to compute before every open sequence generates; tokens "
    "in the prefix cache and tokens of future output are not counted.",
    "num_pages": "KV pages of the engine: free, cached and held ones.",
    "num_free_pages": "KV pages that hold nothing.",
    "num_cached_pages": "KV pages of cached prefixes that no sequence uses; they are evicted when "
    "pages are needed.",
    "num_held_pages": "KV pages that sequences use.",
    "num_window_pages": "KV pages of sliding-window layers, if these have a pool of their own.",
    "num_free_window_pages": "KV pages of sliding-window layers that hold nothing.",
    "num_held_window_pages": "KV pages of sliding-window layers that sequences use.",
    "kv_usage": "Share of KV pages in use by sequences, 0 to 1, of the fuller pool; cached pages "
    "are not in use.",
    "prompt_tokens_total": "Prompt tokens of sequences that have started, cached ones included.",
    "cached_tokens_total": "Prompt tokens that were found in the prefix cache.",
    "generated_tokens_total": "Tokens that sequences have generated.",
    "preemptions_total": "Sequences that lost their KV pages to others and were computed again.",
    "evicted_pages_total": "Cached KV pages that were evicted because pages were needed.",
    "evicted_window_pages_total": "Cached KV pages of sliding-window layers that were evicted.",
    "aborted_total": "Sequences that ended early: aborted, failed, or abandoned by their client.",
    "finished_total": "Sequences that ended by a stop condition or at their length limit.",
    "steps_total": "Engine steps, each of which is one forward pass of the model.",
    "step_time_seconds_total": "Time in engine steps, from planning to applied results.",
    "last_step_seconds": "Duration of the last engine step.",
}
_GRAMMAR = {
    "num_cached": "Compiled grammars in the cache.",
    "cached_bytes": "Memory of the cached compiled grammars.",
    "num_waiting": "Grammars that are being compiled or wait for it.",
    "hits_total": "Constrained requests whose grammar was in the cache.",
    "misses_total": "Constrained requests whose grammar had to be compiled.",
    "failures_total": "Grammars that could not be compiled.",
}
_LORA = {
    "loads_total": "Adapters that were loaded into memory.",
    "misses_total": "Requests whose adapter was not in memory and had to be loaded first.",
    "evictions_total": "Adapters that were dropped from memory to make room for others.",
    "not_finite_total": "Answers of adapters that were not finite (NaN or infinity).",
    "loaded": "Adapters in memory.",
    "used": "Adapters in memory that running requests use.",
    "waiting": "Adapters that wait for memory to be loaded into.",
    "host_bytes": "Host memory of the adapters in memory.",
}
HELP: Mapping[str, str] = {
    **_ENGINE,
    **{f"grammar_{name}": text for name, text in _GRAMMAR.items()},
    **{f"lora_{name}": text for name, text in _LORA.items()},
}
