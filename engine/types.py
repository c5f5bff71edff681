"""The engine's data types, in the order of data flow.

    Request -> Sequence (scheduler/sequence.py) -> StepPlan -> ForwardBatch (runner/batch.py)
            -> StepResult -> SequenceOutput -> Output

`StepPlan` and `StepResult` hold ints, numpy arrays and frozen values only. Nothing else crosses
between the scheduler and the ranks, so scheduler tests need no model. Nothing here knows torch,
Ray or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field, fields
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from remora.configs.errors import InvalidRequest
from remora.engine.beams.moves import BeamMoves
from remora.engine.embeddings import EmbeddedTokens, PromptEmbeddings
from remora.engine.grammar.interface import Forkable as Forkable
from remora.engine.grammar.interface import Grammar as Grammar
from remora.engine.grammar.interface import MaskWords as MaskWords
from remora.engine.grammar.interface import Matcher as Matcher
from remora.engine.grammar.interface import MatcherTooSlow as MatcherTooSlow
from remora.engine.grammar.interface import Reversible as Reversible
from remora.engine.sampling.params import MAX_LOGPROBS as MAX_LOGPROBS
from remora.engine.sampling.params import MAX_N as MAX_N
from remora.engine.sampling.params import MAX_SEED as MAX_SEED
from remora.engine.sampling.params import MAX_STOP_CHARS as MAX_STOP_CHARS
from remora.engine.sampling.params import MAX_STOP_STRINGS as MAX_STOP_STRINGS
from remora.engine.sampling.params import SamplingParams as SamplingParams
from remora.engine.spec.counts import NONE_VERIFIED, DraftCounts
from remora.engine.stats import EngineStats as EngineStats
from remora.engine.tenants import EVERYONE, Tenant

IntArray = npt.NDArray[np.int32]
TokenArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]

NO_DRAFTS: IntArray = np.empty(0, dtype=np.int32)
NO_TOKENS: TokenArray = np.empty(0, dtype=np.int64)


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBudget:
    """The reasoning that an output begins with. A grammar applies to the answer after it.

    end:       text that ends it
    end_ids:   tokens of `end`, which are forced when the budget is spent
    budget:    most tokens of reasoning; None = no limit
    exit_ids:  tokens that may end the output within the reasoning, even with a grammar

    Raises InvalidRequest.
    """

    end: str
    end_ids: tuple[int, ...]
    budget: int | None = None
    exit_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.end or not self.end_ids:
            raise InvalidRequest("The end of reasoning has no text or no tokens.", "thinking")
        if self.budget is not None and self.budget < 0:
            raise InvalidRequest(
                f"The reasoning budget is {self.budget} tokens; it must be 0 or more.",
                "thinking_token_budget",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of a request to a pooling model.

    per_token:  return the hidden states of all tokens instead of the head's output
    is_scored:  with `per_token`: return the head's output for each token's state
    second:     index of the second text's first token in a pair; None = one text
    """

    per_token: bool = False
    is_scored: bool = False
    second: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One tokenised request, which becomes `sampling.n` sequences.

    priority:    higher starts sooner, of the same tenant
    cache_salt:  prefix-cache entries are shared only between requests of the same salt
    lora_id:     id of one load of an adapter; 0 = the base model
    grammar:     that the whole output must match
    reasoning:   set if the output begins with reasoning
    heal:        token healing: drop the last prompt token and let the output begin with its text,
                 perhaps as the beginning of a longer token; that text is not shown again. Not
                 together with `grammar`, `reasoning` or prompt log-probabilities.
    resumption:  set if the output may continue on another engine, or began on one
    kept_tokens: leading tokens of the prompt whose pages are evicted after all others
    prediction_ids:  tokens that the output is expected to have, a source of drafts
    pooling:     of a request to a pooling model; None = generate text
    tenant:      whose request it is
    embeddings:  of the whole prompt, which then has no token ids: `prompt_ids` are
                 `embeddings.ids`; None = it has
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
    prediction_ids: SequenceABC[int] = ()
    pooling: PoolingParams | None = None
    tenant: Tenant = EVERYONE
    embeddings: PromptEmbeddings | None = None

    @property
    def given_ids(self) -> SequenceABC[int]:
        """Output tokens of another engine, which are read like a prompt."""
        return () if self.resumption is None else self.resumption.given_ids

    @property
    def namespace(self) -> Namespace:
        """Namespace of its pages in the prefix cache."""
        digest = "" if self.embeddings is None else self.embeddings.digest
        return Namespace(lora_id=self.lora_id, salt=self.cache_salt, embeddings=digest)

    @property
    def shown_ids(self) -> SequenceABC[int]:
        """The prompt's token ids; none if it was given as embeddings."""
        return self.prompt_ids if self.embeddings is None else ()

    @property
    def healed_id(self) -> int | None:
        """The prompt token that is dropped for healing, if any; one prompt token remains."""
        return self.prompt_ids[-1] if self.heal and len(self.prompt_ids) > 1 else None

    @property
    def kept_prompt_ids(self) -> SequenceABC[int]:
        """The prompt without a token that is healed."""
        return self.prompt_ids if self.healed_id is None else self.prompt_ids[:-1]


@dataclass(frozen=True, slots=True)
class Resumption:
    """Continues the output of another engine, for a request with one sequence.

    given:  events of that engine, grouped by the Output that they became; they become the same
            Outputs again
    note:   called with the events of each further Output before it is delivered
    """

    given: tuple[tuple[SequenceOutput, ...], ...]
    note: Callable[[SequenceABC[SequenceOutput]], None]

    @property
    def given_ids(self) -> list[int]:
        """Tokens of all given events."""
        return [token for events in self.given for event in events for token in event.token_ids]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Root key of the prefix cache: KV of two namespaces is never shared.

    `lora_id` is assigned at each adapter load (0 = the base model) and is never a caller's string,
    so no caller can name another's entries.

    embeddings:  digest of a prompt given as embeddings, whose ids say nothing
    request_id:  of the only request whose outputs share the entries, which are dropped when it
                 ends; "" = any request does, and they are kept for later ones
    """

    lora_id: int = 0
    salt: str = ""
    embeddings: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInit:
    """A row that starts, or restarts after preemption, with this step.

    token_ids:          [num_tokens] all known tokens, prompt then output
    num_prompt_tokens:  length of the prompt
    seed:               of this row's random numbers; drawn on arrival if the request has none
    prompt_logprobs:    most likely tokens to report for each prompt token; None = the prompt is not
                        scored, or was already
    hidden_states:      whether to return the final hidden states of its tokens
    grammar, reasoning: as in Request
    healed_id:          token whose text the output must begin with
    adapter_slot:       of the adapter, counted from 1; 0 = none
    has_ids:            whether the prompt's ids are tokens; it may be given as embeddings instead
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
    has_ids: bool = True


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """An adapter to load into a slot."""

    slot: int
    lora_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass, as deltas against the ranks' state of each row.

    loads:       adapters to load into slots first, replacing their contents
    added:       rows that start, replacing their old state
    dropped:     rows that ended since the last plan
    page_rows:   [num_new_pages] row that each page of `page_ids` is appended to, in order
    page_ids:    [num_new_pages]
    window_ids:  [num_new_pages] the page of window layers for each, 0 = none needed; empty if these
                 layers have no page pool of their own
    rows:        [num_rows] rows that compute in this step; rows with one token come first
    starts:      [num_rows] tokens of the row whose KV is computed
    num_tokens:  [num_rows] tokens to compute, at least 1
    samples:     [num_rows] whether the row's last computed token yields a new token
    num_drafts:  [num_rows] drafts among the row's tokens, which are its last ones: the row yields a
                 new token for each draft that turns out right, and one more; empty = no row has any
    draft_ids:   [sum of num_drafts] the drafts, row by row
    embedded:    tokens whose embeddings are given; None = there are none
    moves:       of beam searches, after `added` and before new pages; None = there are none
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
    num_drafts: IntArray = field(default_factory=lambda: NO_DRAFTS)
    draft_ids: TokenArray = field(default_factory=lambda: NO_TOKENS)
    embedded: EmbeddedTokens | None = None
    moves: BeamMoves | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Log-probabilities of `num` tokens of one row, from the raw distribution.

    token_ids:     [num]
    logprobs:      [num] natural logarithm
    ranks:         [num] 1 = the most likely
    top_ids:       [num, k] most likely first
    top_logprobs:  [num, k]
    asked_ids:     [num, m] the request's `logprob_token_ids`; [0, 0] = none
    asked_logprobs:  [num, m]
    """

    token_ids: TokenArray
    logprobs: FloatArray
    ranks: IntArray
    top_ids: TokenArray
    top_logprobs: FloatArray
    asked_ids: TokenArray = field(default_factory=lambda: np.empty((0, 0), np.int64))
    asked_logprobs: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def part(self, here: slice) -> LogprobRows:
        """Return some of the lines."""
        return LogprobRows(**{name: getattr(self, name)[here] for name in LOGPROB_FIELDS})


LOGPROB_FIELDS = tuple(each.name for each in fields(LogprobRows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The likeliest next tokens of one beam, best first.

    token_ids:  [num]
    scores:     [num] log-probabilities, after masks, bias, penalties and bans
    logprobs:   [num] lines of the raw distribution; None = not requested
    """

    token_ids: TokenArray
    scores: FloatArray
    logprobs: LogprobRows | None = None


NO_CANDIDATES = Candidates(token_ids=NO_TOKENS, scores=np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why a row cannot continue.

    of_request:  its request is the cause, not the engine
    limit:       key of the limit that the request is over; "" = none
    """

    reason: str
    of_request: bool = False
    limit: str = ""

    def __str__(self) -> str:
        return self.reason


NOT_FINITE = RowFault("the model's logits were not finite")
NO_TOKEN_LEFT = RowFault("no token is allowed next", of_request=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one forward pass.

    rows:             [num_sampled] the row of each new token, in the plan's order; a row that got
                      several, of drafts, is repeated
    token_ids:        [num_sampled]
    logprobs:         row -> a line for each of its new tokens; only rows that asked
    prompt_logprobs:  row -> a line for each prompt token that this step has scored
    hidden_states:    row -> [num, hidden_size] of its tokens in this step, if it asked
    bad_rows:         row -> why it has no token: its logits were not finite, no token was allowed,
                      or its constraint failed
    completed:        rows whose grammar is complete with their last new token: they end here
    candidates:       beam -> its likeliest next tokens, instead of a token
    forward_s, sample_s:  seconds spent, without applying the plan's changes of rows
    draft_s:          seconds that a drafter spent on the step's drafts; 0 = it made none
    """

    step_id: int
    rows: IntArray
    token_ids: TokenArray
    logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    hidden_states: Mapping[int, FloatArray] = field(default_factory=dict)
    bad_rows: Mapping[int, RowFault] = field(default_factory=dict)
    completed: frozenset[int] = frozenset()
    candidates: Mapping[int, Candidates] = field(default_factory=dict)
    forward_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0

    def runs(self) -> dict[int, tuple[int, ...]]:
        """Return the new tokens of each row that got any."""
        rows, token_ids = self.rows.tolist(), self.token_ids.tolist()
        runs: dict[int, tuple[int, ...]] = dict(zip(rows, zip(token_ids, strict=True), strict=True))
        if len(runs) < len(rows):  # a row got several
            runs = {}
            for row, token_id in zip(rows, token_ids, strict=True):
                runs[row] = (*runs.get(row, ()), token_id)
        return runs


@dataclass(slots=True, kw_only=True)  # frozen would double the time to make one
class SequenceOutput:
    """A step's output for one sequence, passed from the engine loop to the caller's thread.

    Not changed once it is made.

    token_ids:        new tokens; empty for a mere end such as an abort
    logprobs:         a line for each new token, when requested
    prompt_logprobs:  parts that together hold a line for each prompt token but the first; with the
                      first token only
    hidden_states:    [num_tokens - 1, hidden_size] of prompt and output; with the last token only
    pooled:           output of a pooling model: [size], or [num_tokens, hidden_size]
    stop_token_id:    the id that ended the sequence, if one did
    error:            why the sequence failed; its finish_reason is then `abort`
    queue_s:          seconds until its first step
    drafts:           verified drafts so far
    predicted:        tokens of the request's prediction that became output so far, and that did not
    score:            of a beam search's output, by which these are ranked
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
    drafts: DraftCounts = field(default=NONE_VERIFIED, compare=False)
    predicted: tuple[int, int] = field(default=(0, 0), compare=False)
    score: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, of the most likely alternatives, and of tokens asked for."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    asked: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The newest output of one of a request's `n` sequences, as the caller gets it.

    index:            which of the n
    token_ids, text:  new since the last Output of this index; `text` may lag behind the ids while
                      an incomplete character or a possible stop string is held back
    logprobs:         one for each of `token_ids`, when requested
    prompt_logprobs:  on the first Output of index 0, when requested; entry 0 is None
    hidden_states:    [num_tokens - 1, hidden_size] float32 of prompt and output; on the last Output
                      when requested
    pooled:           output of a pooling model, float32
    finish_reason:    set on the last Output of this index only
    stop_reason:      the stop string or token id that ended it; None for the model's own end
    num_output_tokens, num_cached_tokens:  totals so far
    queue_s:          seconds until the sequence's first step
    drafts:           verified drafts so far, without right ones after the output's end
    predicted:        as in SequenceOutput; on the last Output
    score:            of a beam search's output, by which these are ranked
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
    drafts: DraftCounts = field(default=NONE_VERIFIED, compare=False)
    predicted: tuple[int, int] = field(default=(0, 0), compare=False)
    score: float | None = None
