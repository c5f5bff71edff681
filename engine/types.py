"""The nouns of the engine, in the order in which data becomes them.

    Request -> Sequence (scheduler/sequence.py) -> StepPlan -> ForwardBatch (runner/batch.py)
            -> StepResult -> SequenceOutput -> Output

`StepPlan` and `StepResult` hold ints, numpy arrays and frozen values only: they are all that
crosses from the scheduler to the ranks and back, and scheduler tests assert on them with no model
loaded. Nothing here knows torch, Ray or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from remora.configs.errors import InvalidRequest
from remora.engine.sampling.params import MAX_N as MAX_N
from remora.engine.sampling.params import MAX_SEED as MAX_SEED
from remora.engine.sampling.params import MAX_STOP_CHARS as MAX_STOP_CHARS
from remora.engine.sampling.params import MAX_STOP_STRINGS as MAX_STOP_STRINGS
from remora.engine.sampling.params import SamplingParams as SamplingParams

IntArray = npt.NDArray[np.int32]
TokenArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
MaskWords = npt.NDArray[np.int32]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class MatcherTooSlow(Exception):
    """Following a grammar takes more time than its row may cost others."""


class Matcher(Protocol):
    """How far one sequence has come in its grammar. May raise MatcherTooSlow."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end-of-sequence token may follow."""
        ...

    def fill(self, words: MaskWords) -> None:
        """Write which tokens may come next: bit i of `words` [ceil(vocab_size / 32)] is token i."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changed, if the grammar does not allow it."""
        ...


class Grammar(Protocol):
    """A compiled constraint on output. Immutable, shared by the sequences that it guides."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...

    def matcher(self) -> Matcher:
        """Return a new matcher at the start of the grammar."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBudget:
    """The thought that an answer begins with. A grammar holds for what comes after it.

    end:      text that ends it
    end_ids:  its tokens, which are forced when the budget is used up
    budget:   most tokens of thought; None = no limit
    exit_ids: tokens that may end the output within the thought, although a grammar waits

    Raises InvalidRequest.
    """

    end: str
    end_ids: tuple[int, ...]
    budget: int | None = None
    exit_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.end or not self.end_ids:
            raise InvalidRequest("The end of thought has no text or no tokens.", "thinking")
        if self.budget is not None and self.budget < 0:
            raise InvalidRequest(
                f"The budget of thought is {self.budget} tokens; it must be 0 or more.",
                "thinking_token_budget",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What is asked of a model that makes no text.

    per_token:  the hidden states of all tokens, in the place of what the head makes of them
    second:     where the second text of a pair begins; None = there is one text
    """

    per_token: bool = False
    second: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call from outside, tokenised: `sampling.n` sequences are made of it.

    priority:    the higher, the sooner
    cache_salt:  prefix-cache entries are shared only between requests of the same salt
    lora_id:     id of one load of an adapter; 0 = the base model
    grammar:     what the output must match, to its end
    reasoning:   set when the output begins with reasoning
    heal:        take the last prompt token back and let the output begin by writing its text anew,
                 perhaps as the beginning of a longer token; that text is not shown again. Not
                 together with `grammar`, `reasoning` or prompt log-probabilities.
    resumption:  set when the output may have to go on elsewhere, or has begun elsewhere
    kept_tokens: leading tokens of the prompt whose pages leave the prefix cache after all others
    pooling:     of a model that makes no text; None = text is asked for
    """

    request_id: str
    prompt_ids: SequenceABC[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    lora_id: int = 0
    grammar: Grammar | None = None
    reasoning: ReasoningBudget | None = None
    heal: bool = False
    resumption: Resumption | None = None
    kept_tokens: int = 0
    pooling: PoolingParams | None = None

    @property
    def given_ids(self) -> SequenceABC[int]:
        """Output tokens that another engine has given; they are not computed anew, only read."""
        return () if self.resumption is None else self.resumption.given_ids

    @property
    def namespace(self) -> Namespace:
        """Where in the prefix cache it may find and leave pages."""
        return Namespace(lora_id=self.lora_id, salt=self.cache_salt)

    @property
    def healed_id(self) -> int | None:
        """The prompt token that is taken back, if any; a prompt keeps at least one."""
        return self.prompt_ids[-1] if self.heal and len(self.prompt_ids) > 1 else None

    @property
    def kept_prompt_ids(self) -> SequenceABC[int]:
        """The prompt as the model reads it: without a token that is healed."""
        return self.prompt_ids if self.healed_id is None else self.prompt_ids[:-1]


@dataclass(frozen=True, slots=True)
class Resumption:
    """How the output of a request with one sequence goes on where another engine's has ended.

    given:  what that engine has given: the events that became each Output, in order. They become
            the same Outputs again.
    note:   called with the events of each further Output before it is given
    """

    given: tuple[tuple[SequenceOutput, ...], ...]
    note: Callable[[SequenceABC[SequenceOutput]], None]

    @property
    def given_ids(self) -> list[int]:
        """All tokens given."""
        return [token for events in self.given for event in events for token in event.token_ids]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Root key of the prefix cache: KV of two namespaces is never shared.

    `lora_id` is an id drawn by us at each adapter load (0 = the base model), never a
    caller's string, so no caller can name another's entries.
    """

    lora_id: int = 0
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInit:
    """A row that starts (or starts again after preemption) with this step.

    token_ids:          [num_tokens] all known tokens, prompt then output
    num_prompt_tokens:  how many of them are prompt
    seed:               of this row's random numbers; drawn on arrival when the caller gave none
    prompt_logprobs:    how many most likely tokens to report beside each prompt token; None = the
                        prompt is not scored (or has been)
    hidden_states:      whether the final hidden states of what it computes are told
    grammar, reasoning: as in Request
    healed_id:          token whose text the output must begin with
    adapter_slot:       of the adapter, counted from 1; 0 = none
    """

    row: int
    token_ids: TokenArray
    num_prompt_tokens: int
    seed: int
    sampling: SamplingParams
    prompt_logprobs: int | None = None
    hidden_states: bool = False
    grammar: Grammar | None = None
    reasoning: ReasoningBudget | None = None
    healed_id: int | None = None
    adapter_slot: int = 0


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """An adapter that is to be put into a slot."""

    slot: int
    lora_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass, as deltas against what the ranks already know of each row.

    loads:       adapters to put into slots before anything else; who was there is void
    added:       rows that start; their old state, if any, is void
    dropped:     rows that ended since the last plan
    page_rows:   [num_new_pages] row that each page of `page_ids` is appended to, in order
    page_ids:    [num_new_pages]
    window_ids:  [num_new_pages] the page of window layers beside each, 0 = nobody will read one;
                 empty where these layers have no pages of their own
    rows:        [num_rows] rows that compute in this step; rows with one token come first
    starts:      [num_rows] tokens of the row whose KV is already there
    num_tokens:  [num_rows] tokens to compute, at least 1
    samples:     [num_rows] whether the row's last computed token yields a new token
    """

    step_id: int
    added: tuple[RowInit, ...]
    dropped: IntArray
    page_rows: IntArray
    page_ids: IntArray
    rows: IntArray
    starts: IntArray
    num_tokens: IntArray
    samples: BoolArray
    loads: tuple[SlotLoad, ...] = ()
    window_ids: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Log-probabilities of `num` tokens of one row, from the raw distribution.

    token_ids:     [num]
    logprobs:      [num] natural logarithm
    ranks:         [num] 1 = the most likely
    top_ids:       [num, k] most likely first
    top_logprobs:  [num, k]
    """

    token_ids: TokenArray
    logprobs: FloatArray
    ranks: IntArray
    top_ids: TokenArray
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why a row cannot go on. `of_request`: its request is to blame, and not the engine."""

    reason: str
    of_request: bool = False

    def __str__(self) -> str:
        return self.reason


NOT_FINITE = RowFault("the model's logits were not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one forward pass gave.

    rows:             [num_sampled] rows that got a token, in the plan's order
    token_ids:        [num_sampled]
    logprobs:         row -> one line; only rows that asked
    prompt_logprobs:  row -> a line for each prompt token whose probability this step has computed
    hidden_states:    row -> those [num, hidden_size] of the tokens that it computed, if it asked
    bad_rows:         row -> why it has no token: its logits were not finite, nothing was left to
                      choose, or its constraint failed
    completed:        rows whose grammar is complete with this token: they end here
    forward_s, sample_s:  seconds spent; what a plan says of rows is taken in before both
    """

    step_id: int
    rows: IntArray
    token_ids: TokenArray
    logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    hidden_states: Mapping[int, FloatArray] = field(default_factory=dict)
    bad_rows: Mapping[int, RowFault] = field(default_factory=dict)
    completed: frozenset[int] = frozenset()
    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What a step means for one sequence; crosses from the engine loop to the caller's thread.

    token_ids:        new tokens (none: a pure end, e.g. an abort)
    logprobs:         a line for each new token, when asked for
    prompt_logprobs:  parts that together hold a line for each prompt token but the first; with the
                      first token only
    hidden_states:    [num_tokens - 1, hidden_size] of prompt and output; with the last token only
    pooled:           what a model that makes no text gives: [size], or [num_tokens, hidden_size]
    stop_token_id:    the id that ended the sequence, when one did
    error:            why the engine had to give the sequence up; its finish_reason is `abort`
    queue_s:          seconds that it waited for its first step
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[LogprobRows, ...] = ()
    hidden_states: FloatArray | None = field(default=None, compare=False)
    pooled: FloatArray | None = field(default=None, compare=False)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: RowFault | None = None
    queue_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, and of the most likely ones in its place."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the caller sees: the newest piece of one of the request's `n` sequences.

    index:            which of the n
    token_ids, text:  new since the last Output of this index; `text` may lag behind the ids while
                      an incomplete character or a possible stop string is held back
    logprobs:         one for each of `token_ids`, when asked for
    prompt_logprobs:  on the first Output of index 0, when asked for; entry 0 is None
    hidden_states:    [num_tokens - 1, hidden_size] float32 of prompt and output; on the last Output
                      when asked for
    pooled:           what a model that makes no text gives, float32
    finish_reason:    set on the last Output of this index, and only there
    stop_reason:      the stop string or token id that ended it; None for the model's own end
    num_output_tokens, num_cached_tokens:  totals so far
    queue_s:          seconds that the sequence waited for its first step
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    hidden_states: FloatArray | None = field(default=None, compare=False)
    pooled: FloatArray | None = field(default=None, compare=False)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    queue_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters and gauges at one moment. `*_total` only grow; times are in seconds.

    num_queued_tokens:  tokens to compute before every open sequence decodes: of those that wait
                        what the prefix cache lacked when they began to, of running ones what is
                        left of the prompt. Output to come is not in it.
    num_window_pages:   of layers with a sliding window, where they have pages of their own; those
                        that are neither free nor held are cached
    """

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    evicted_pages_total: int
    aborted_total: int
    finished_total: int
    steps_total: int
    step_time_total_s: float
    last_step_s: float
    num_window_pages: int = 0
    num_free_window_pages: int = 0
    num_held_window_pages: int = 0
    evicted_window_pages_total: int = 0

    @property
    def kv_usage(self) -> float:
        """Part of the KV pages that cannot be had without preempting someone (0 to 1).

        Where there are two kinds, of the one of which less is left.
        """
        usage = self.num_held_pages / self.num_pages if self.num_pages else 0.0
        if self.num_window_pages:
            usage = max(usage, self.num_held_window_pages / self.num_window_pages)
        return usage
