"""Whether a sequence may start: the estimate of peak memory, and requests that can never fit.

The estimate follows LightLLM's router: each request holds `held` tokens and will add `growth`
tokens; when a request ends, all with more growth are alive and have grown as much, so the peak is

    max over i of  sum(held[0..i]) + (i + 1) * growth[i],   requests by growth, largest first.

The reserved share of future output adapts as in SGLang: it decays while nothing is preempted and
jumps after a preemption. Knows sequences and how many pages they hold; no tensors, no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.configs.planning.plan import EnginePlan
from remora.configs.planning.scheduling_plan import ReservePlan
from remora.engine.kv.cache import KVCache
from remora.engine.kv.pages import pages_needed
from remora.engine.kv.window import WindowPages
from remora.engine.scheduler.sequence import Sequence
from remora.engine.types import Request

MAX_RESERVED_OUTPUT = 4096
FULL_RESERVE_AFTER_EVICTIONS = 3
LONGER_THAN_SO_FAR = 1.1
ADAPTIVE = ReservePlan()


class Start(Enum):
    """Whether a waiting sequence started, and which others may start after it."""

    DONE = "started, or skipped for the moment: the next one may start"
    BLOCKED = "a limit of its own holds it back, and what waits behind it in its tenant"
    FULL = "rows, tokens or memory are lacking: passing it could starve it"


@dataclass(frozen=True, slots=True)
class Demand:
    """KV tokens that one request holds, and those reserved for its output."""

    held: int
    growth: int


def peak_tokens(demands: Iterable[Demand]) -> int:
    """Return the estimated peak of KV tokens that the requests hold together."""
    peak = held = 0
    for rank, demand in enumerate(sorted(demands, key=lambda d: -d.growth), start=1):
        held += demand.held
        peak = max(peak, held + rank * demand.growth)
    return peak


class ReserveRatio:
    """The share of future output tokens that admission reserves, between 0 and 1.

    rules:  reserves that replace the share or bound it
    """

    START = 0.7
    FLOOR = 0.14  # of the start
    DECAY_STEPS = 600

    def __init__(self, conservativeness: float, rules: ReservePlan = ADAPTIVE) -> None:
        self.rules = rules
        self._start = min(1.0, self.START * conservativeness)
        self._floor = self._start * self.FLOOR
        self.value = self._start

    def on_step(self) -> None:
        """Decay towards the floor."""
        self.value = max(self._floor, self.value - (self._start - self._floor) / self.DECAY_STEPS)

    def on_idle(self) -> None:
        """Start over: the next load may differ from the last."""
        self.value = self._start

    def on_preemption(self, num_produced: int, num_allowed: int, num_rows: int) -> None:
        """Raise the share to that of the running rows: `num_produced` of `num_allowed` tokens."""
        observed = (num_produced + 20 * num_rows) / max(1, num_allowed)
        self.value = max(self.value, min(1.0, observed))

    def growth(self, remaining: int, *, certain: bool, produced: int = 0) -> int:
        """Return the tokens to reserve for a request that may produce `remaining` more."""
        if certain:
            return remaining
        growth = int(self.value * min(remaining, MAX_RESERVED_OUTPUT)) + 1
        expected = self.rules.expected_output_tokens
        if expected is not None:
            longer = max(expected, int(produced * LONGER_THAN_SO_FAR) + 1)
            growth = min(remaining, longer - produced)
        return max(growth, min(remaining, self.rules.min_tokens))

    def capacity(self, num_tokens: int) -> int:
        """Return how many of the KV cache's tokens admission may use."""
        return int(num_tokens * (1 - self.rules.free_fraction))

    def is_full(self, kv: KVCache) -> bool:
        """Return whether KV usage is so high that all output is reserved."""
        full_usage = self.rules.full_usage
        return full_usage is not None and kv.usage >= full_usage


def can_start(
    candidate: Sequence, running: Iterable[Sequence], kv: KVCache, reserve: ReserveRatio
) -> bool:
    """Estimate whether `candidate`, with its cached prefix attached, fits with the running ones."""
    num_published = 0
    is_full = reserve.is_full(kv)
    sequences = (*running, candidate)
    demands = [_demand(seq, kv, reserve, is_full=is_full) for seq in sequences]
    for seq in sequences:
        table = seq.table
        # Pages that the sequence computed and published are counted in `held` already.
        num_published += table.num_published - table.num_matched
    num_borrowed = max(0, kv.num_locked - num_published)
    capacity = reserve.capacity(kv.num_pages * kv.page_size)
    if peak_tokens(demands) > capacity - num_borrowed * kv.page_size:
        return False
    return kv.windows is None or _windows_fit(sequences, demands, kv.windows, kv.page_size, reserve)


def _demand(seq: Sequence, kv: KVCache, reserve: ReserveRatio, *, is_full: bool) -> Demand:
    table = seq.table
    num_pages = max(len(table.pages), pages_needed(seq.num_tokens, kv.page_size))
    if seq.beams is not None:
        num_held = seq.beams.num_held(num_pages - table.num_matched) if seq.index == 0 else 0
        return Demand(held=num_held * kv.page_size, growth=0)
    certain = (
        is_full
        or seq.request.sampling.ignore_eos
        or seq.num_evictions >= FULL_RESERVE_AFTER_EVICTIONS
    )
    return Demand(
        held=(num_pages - table.num_matched) * kv.page_size,
        growth=reserve.growth(seq.num_remaining, certain=certain, produced=seq.num_output_tokens),
    )


def is_within_fraction(
    candidate: Sequence,
    running: Iterable[Sequence],
    kv: KVCache,
    reserve: ReserveRatio,
) -> bool:
    """Estimate whether a tenant's sequences stay within its fraction of the KV cache.

    A tenant's only sequence does. Prefixes that are shared or found cached are not counted.
    """
    tenant = candidate.request.tenant
    if tenant.kv_fraction is None:
        return True
    mine = [seq for seq in running if seq.request.tenant.name == tenant.name]
    if not mine:
        return True
    is_full = reserve.is_full(kv)
    demands = [_demand(seq, kv, reserve, is_full=is_full) for seq in mine]
    own = _demand(candidate, kv, reserve, is_full=is_full)
    num_pages = pages_needed(uncached_tokens(candidate, kv), kv.page_size)
    demands.append(Demand(held=num_pages * kv.page_size, growth=own.growth))
    return peak_tokens(demands) <= tenant.kv_fraction * kv.num_pages * kv.page_size


def _windows_fit(
    sequences: Iterable[Sequence],
    demands: Iterable[Demand],
    windows: WindowPages,
    page_size: int,
    reserve: ReserveRatio,
) -> bool:
    """Estimate whether the pages of window layers fit.

    demands:  of these sequences, in tokens that all layers keep
    A sequence longer than the window holds a constant number of pages, which is added to the peak
    of the shorter ones.
    """
    shorter = []
    num_pages = num_published = 0
    for seq, demand in zip(sequences, demands, strict=True):
        table = seq.table
        most = windows.most_extending if seq.num_pending > 1 else windows.most_decoding
        if demand.held + demand.growth >= most * page_size:
            num_pages += most
        else:
            shorter.append(demand)
        num_published += max(0, table.num_published - max(table.first_window, table.num_matched))
    num_pages += max(0, windows.num_locked - num_published)
    capacity = reserve.capacity(windows.num_pages * page_size)
    return peak_tokens(shorter) <= capacity - num_pages * page_size


def uncached_tokens(seq: Sequence, kv: KVCache) -> int:
    """Return how many tokens of a sequence the next step would have to compute."""
    if seq.computes_prompt:
        return seq.num_tokens
    if seq.leader is not None and not seq.leader.is_finished:
        return seq.num_tokens % kv.page_size + 1  # it borrows the rest from its leader
    known = seq.token_ids[: seq.num_tokens - 1]
    return seq.num_tokens - kv.count_cached(seq.namespace, known)


def check_fits(request: Request, plan: EnginePlan) -> None:
    """Raise PromptTooLong or InvalidRequest unless the request fits an empty engine."""
    num_prompt = len(request.prompt_ids)
    limit = plan.max_sequence_tokens
    if num_prompt == 0:
        raise InvalidRequest("The prompt is empty; it must hold at least one token.", "prompt")
    wanted = request.sampling.max_tokens
    total = num_prompt + (wanted if wanted is not None else 1)
    if total <= limit:
        return
    what = (
        f"the model's context of {plan.max_model_len} tokens"
        if limit == plan.max_model_len
        else f"the KV memory, which holds {plan.kv_tokens} tokens"
    )
    asked = f"{wanted} for the output" if wanted is not None else "at least 1 for the output"
    raise PromptTooLong(
        f"The request needs {total} tokens ({num_prompt} in the prompt, {asked}), {total - limit}"
        f" more than fit in {what}. Shorten the prompt or lower max_tokens.",
        "prompt",
    )
