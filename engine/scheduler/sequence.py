"""One sequence of a request, as the scheduler sees it.

Holds token ids, how far the KV has been computed, and the pages. Knows nothing of steps, rows of
other sequences or the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from remora.engine.beams.pages import BeamPages
from remora.engine.kv.cache import PageTable
from remora.engine.spec.counts import NONE_VERIFIED, DraftCounts
from remora.engine.types import (
    FinishReason,
    FloatArray,
    LogprobRows,
    Namespace,
    Request,
    StepResult,
)


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A prompt and its output so far.

    index:                 which of the request's n
    order:                 position in the order of arrival; kept across preemption
    priority:              higher starts sooner
    max_tokens:            most output tokens, resolved
    num_computed:          leading tokens whose KV is known to be in the pages
    num_in_flight_tokens:  tokens after these, in steps whose results are not known yet
    num_pending_outputs:   output tokens that such steps will sample
    num_starts:            how often it was given a row: results of earlier starts are stale
    num_cached_tokens:     tokens found in the prefix cache at the first admission
    num_queued_tokens:     while it waits: tokens that the cache lacked when it was queued
    row:                   its row at the ranks while it runs
    adapter_slot:          of its adapter while it runs; 0 = no adapter
    num_skipped:           how often others started before it because it waits for an adapter slot
    num_passed:            how often a later arrival started before it, by the policy
    num_evictions:         how often it was preempted because memory was short
    leader:                sibling whose prompt must be computed first, so that this one can borrow
    arrived_s:             by the engine's clock
    queue_s:               seconds until its first step; None before it
    prompt_logprob_parts:  of each chunk, when requested
    drafts:                its verified drafts
    predicted:             tokens of the request's prediction that became output, and that did not
    beams:                 of a beam search: the pages of all of its beams
    longest:               prompt and output tokens at which it ends
    """

    request: Request
    index: int
    seed: int
    order: int
    priority: int
    max_tokens: int
    token_ids: list[int]
    num_prompt_tokens: int
    namespace: Namespace
    leader: Sequence | None = None
    table: PageTable = field(default_factory=PageTable)
    num_computed: int = 0
    num_in_flight_tokens: int = 0
    num_pending_outputs: int = 0
    num_starts: int = 0
    num_cached_tokens: int | None = None
    num_queued_tokens: int = 0
    row: int | None = None
    adapter_slot: int = 0
    num_skipped: int = 0
    num_passed: int = 0
    num_evictions: int = 0
    arrived_s: float = 0.0
    queue_s: float | None = None
    prompt_logprob_parts: list[LogprobRows] = field(default_factory=list)
    hidden_parts: list[FloatArray] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    drafts: DraftCounts = NONE_VERIFIED
    predicted: tuple[int, int] = (0, 0)
    beams: BeamPages | None = None
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = self.num_prompt_tokens + self.max_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_planned(self) -> int:
        """Leading tokens whose KV is computed or in flight."""
        return self.num_computed + self.num_in_flight_tokens

    @property
    def num_pending(self) -> int:
        """Tokens, pending outputs included, that no step computes yet; 1 in steady decode."""
        return (
            len(self.token_ids)
            + self.num_pending_outputs
            - self.num_computed
            - self.num_in_flight_tokens
        )

    @property
    def num_remaining(self) -> int:
        """Output tokens it may still produce."""
        return self.longest - len(self.token_ids)

    @property
    def is_awaited(self) -> bool:
        """Whether its last output token is pending, so that nothing is left to compute.

        A beam is awaited after each step, until its search has chosen its next token.
        """
        pending = self.num_pending_outputs
        if self.beams is not None:
            return pending > 0 or len(self.token_ids) == self.num_computed
        return pending > 0 and len(self.token_ids) + pending >= self.longest

    @property
    def waits_for_leader(self) -> bool:
        """Whether it would have to compute a prompt that it can borrow later."""
        leader = self.leader
        return leader is not None and not (leader.is_finished or leader.prompt_is_computed)

    @property
    def is_pinned(self) -> bool:
        """Whether it cannot be preempted: it is a beam, or is to become one."""
        return self.beams is not None and (self.beams.has_begun or self.index > 0)

    @property
    def num_rows(self) -> int:
        """Rows that it takes when it starts."""
        beams = self.request.sampling.beams
        return 1 if beams is None else beams.width

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def prompt_is_computed(self) -> bool:
        """Whether the prompt's KV is complete, so that siblings can borrow it."""
        return self.num_computed >= self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are requested and incomplete; only the first of n has them."""
        if self.request.sampling.prompt_logprobs is None or self.index != 0:
            return False
        return sum(len(p.token_ids) for p in self.prompt_logprob_parts) < self.num_prompt_tokens - 1

    @property
    def num_hidden(self) -> int:
        """Leading tokens whose hidden states are kept."""
        return sum(map(len, self.hidden_parts))

    @property
    def hidden_states(self) -> FloatArray | None:
        """Hidden states of its leading tokens [num_hidden, hidden_size]; None if not requested."""
        return np.concatenate(self.hidden_parts) if self.hidden_parts else None

    @property
    def computes_prompt(self) -> bool:
        """Whether it must compute its whole prompt, because cached KV holds no logits or states."""
        wants_hidden = self.request.sampling.hidden_states and self.num_hidden < self.num_tokens - 1
        return self.wants_prompt_logprobs or wants_hidden

    def take_hidden(self, start: int, states: FloatArray) -> None:
        """Append the hidden states of tokens from `start` on."""
        self.hidden_parts.append(states[self.num_hidden - start :])

    def take_extras(self, row: int, count: int, result: StepResult) -> None:
        """Keep hidden states and prompt log-probabilities of its row, before its tokens count."""
        if row in result.hidden_states:
            self.take_hidden(self.num_computed, result.hidden_states[row][:count])
        if row in result.bad_rows:
            return
        if row in result.prompt_logprobs and self.wants_prompt_logprobs:
            self.prompt_logprob_parts.append(result.prompt_logprobs[row])


def running_rows(
    running: Iterable[Sequence], prompts: Collection[Sequence]
) -> tuple[list[Sequence], list[Sequence]]:
    """Return running sequences with one token to compute, and those with more.

    prompts:  sequences that may have more
    """
    if not prompts:
        return [seq for seq in running if not seq.is_awaited], []
    decoding: list[Sequence] = []
    extending: list[Sequence] = []
    for seq in running:
        if seq in prompts and seq.num_pending > 1:
            extending.append(seq)
        elif not seq.is_awaited:
            decoding.append(seq)
    return decoding, extending
