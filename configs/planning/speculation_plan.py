"""How rows get drafts, and what must hold for it. Pure functions; knows no engine."""

from __future__ import annotations

from dataclasses import dataclass

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig
from remora.configs.sections.speculation import Method

_BY_HEADS: tuple[Method, ...] = ("eagle", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """Where drafts come from, and how many a row may have.

    max_drafts:         of a row in one step
    shortest, longest:  tokens of the n-grams that are looked up
    max_bytes:          memory of the index of all running requests
    max_shared_bytes:   memory of the texts of earlier requests; None = not kept
    is_adaptive:        whether draft lengths follow measured acceptance and step times
    max_tokens:         longest sequence that may have drafts; None = any
    captures:           layers whose inputs a draft head reads
    head_bytes:         weights of the draft head
    head_token_bytes:   KV of a token in the draft head
    head_state_bytes:   states that are kept for it, of each token of a step
    """

    method: Method = "ngram"
    max_drafts: int
    shortest: int
    longest: int
    max_bytes: int
    max_shared_bytes: int | None = None
    is_adaptive: bool = True
    max_tokens: int | None = None
    captures: tuple[int, ...] = ()
    head_bytes: int = 0
    head_token_bytes: int = 0
    head_state_bytes: int = 0

    def state_bytes(self, max_tokens: int, max_rows: int) -> int:
        """Return the bytes of the states that are kept for a head where torch computes."""
        return self.head_state_bytes * max(max_tokens, max_rows)


def plan_speculation(config: ServeConfig, device: str) -> SpeculationPlan | None:
    """Return how rows get drafts, without a draft model; None = not at all.

    Raises ConfigError where the method does not work.
    """
    section = config.speculation
    if section.method == "none":
        return None
    if device != "cpu" and config.engine.deterministic:
        raise ConfigError(
            "engine.deterministic = true: on a GPU, attention of verified drafts is summed in "
            "another order than that of single tokens; leave the section speculation out"
        )
    if section.method in _BY_HEADS and config.parallel.pp_size > 1:
        raise ConfigError(
            f"speculation.method = {section.method}: a head drafts on rank 0, and the states that "
            f"it reads are on the last of parallel.pp_size = {config.parallel.pp_size} stages; set "
            "it to 1 and parallel.tp_size to the number of ranks, use method ngram or draft, or "
            "leave the section speculation out"
        )
    return SpeculationPlan(
        method=section.method,
        max_drafts=section.max_drafts,
        shortest=section.shortest_suffix,
        longest=section.longest_suffix,
        max_bytes=section.index_memory,
        max_shared_bytes=section.shared_index_memory,
        is_adaptive=section.adaptive,
    )
