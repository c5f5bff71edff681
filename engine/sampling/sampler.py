"""The logit pipeline of a batch: each row's parameters, kept between steps, and their application.

Order, for every row: mask, bias, penalties, bans, custom processor, temperature, top-k, top-p,
min-p, locally typical, infill, draw. Greedy rows take the greatest logit before temperature.
Log-probabilities are of the raw logits.

A row's token depends on its own logits, parameters, seed and position (number of output tokens so
far), never on other rows: the filters are batch-invariant (`kernels/sampling.py`) and the random
number is a function of (seed, position), so a row that was preempted or moved continues exactly as
an undisturbed one would. Knows nothing of pages or requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from torch import Tensor

from remora.configs.errors import InvalidSampling
from remora.engine.beams.candidates import BeamLine, BeamLogits, FoundCandidates
from remora.engine.beams.moves import BeamMoves
from remora.engine.sampling.grammar_masks import RowMasks
from remora.engine.sampling.logit_edits import RowEdits, apply_edits
from remora.engine.sampling.logit_processors import LogitProcessor, RowProcessor
from remora.engine.sampling.row_filters import RowFilter
from remora.engine.sampling.token_sampler import (
    Draws,
    HostTokenSampler,
    SampledLogprobs,
    SampledTokens,
    TokenSampler,
)
from remora.engine.spec.acceptance import DraftLines
from remora.engine.tokens.token_text import Spellings
from remora.engine.types import (
    BoolArray,
    Candidates,
    IntArray,
    LogprobRows,
    Request,
    RowFault,
    RowInit,
    SamplingParams,
    TokenArray,
)
from remora.kernels import sampling as torch_kernels
from remora.kernels.memory import to_device

SeedArray = npt.NDArray[np.uint64]
_Asked = tuple[int, tuple[int, ...]]  # number of likely tokens, ids of further ones

# Below this, float32 may overflow while the outcome no longer changes.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """New tokens of the sampled rows: one each, or several with drafts.

    rows:       [N] the row of each token, in the order of the `rows` argument
    token_ids:  [N]
    logprobs:   row -> a line for each of its tokens; only rows that asked
    bad_rows:   row -> why it has no token: its logits held a NaN or an infinity, no token was
                allowed, or its constraint failed. Its token and log-probabilities are meaningless;
                the engine ends these requests, and only these, with an error.
    completed:  rows whose grammar is complete with their last token
    candidates: beam -> its likeliest next tokens; it has no token
    """

    rows: IntArray
    token_ids: TokenArray
    logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    bad_rows: Mapping[int, RowFault] = field(default_factory=dict)
    completed: frozenset[int] = frozenset()
    candidates: Mapping[int, Candidates] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSample:
    """Tokens of rows [R], perhaps still on a device.

    logprobs:  (lines that asked for log-probabilities, these)
    failed:    rows whose processor failed
    drafts:    of the rows, if any have some
    beams:     candidates of lines of beams, if there are some
    """

    rows: IntArray
    sampled: SampledTokens
    logprobs: tuple[tuple[TokenArray, SampledLogprobs], ...] = ()
    failed: Mapping[int, RowFault] = field(default_factory=dict)
    drafts: DraftLines | None = None
    beams: FoundCandidates | None = None


def random_bits(seeds: SeedArray, positions: SeedArray) -> TokenArray:
    """Return 64 random bits for each (seed, position).

    Counter-based: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014; finaliser: Stafford's Mix13). The seed is mixed into a starting
    state, the position counts its steps.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = _mix64(seeds + golden)
    return _mix64(state + (positions + np.uint64(1)) * golden).view(np.int64)


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Raise InvalidSampling if a parameter names a token that the model does not have."""
    sampling, reasoning = request.sampling, request.reasoning
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("bad_words", [token_id for run in sampling.bad_words_ids for token_id in run]),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("first_token_ids", sampling.first_token_ids),
        ("logprob_token_ids", sampling.logprob_token_ids),
        ("thinking", () if reasoning is None else reasoning.end_ids),
    ):
        foreign = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
        if foreign:
            raise InvalidSampling(
                f"{name} names token {foreign[0]}; the model's ids are 0 to {vocab_size - 1}.", name
            )


class Sampler:
    """Samples the next token of rows, whose parameters and output counts it keeps.

    token_sampler:  where tokens are chosen: on the host or on the device
    spellings:      bytes of each token; None = neither reasoning nor token healing
    processors:     that `custom_logit_processor` may name
    """

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        token_sampler: TokenSampler | None = None,
        spellings: Spellings | None = None,
        processors: Mapping[str, LogitProcessor] = MappingProxyType({}),
    ) -> None:
        self.token_sampler = token_sampler or HostTokenSampler(torch_kernels)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float64)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seeds = np.zeros(max_rows, np.uint64)
        self._num_outputs = np.zeros(max_rows, np.int64)
        self._is_plain = np.zeros(max_rows, np.bool_)  # logits are neither edited nor described
        self._prepared: tuple[IntArray | None, Draws | None] = (None, None)
        self._edits: dict[int, RowEdits] = {}
        self._processors = processors
        self._processed: dict[int, RowProcessor] = {}
        self._filters: dict[int, RowFilter] = {}
        self._logprobs: dict[int, _Asked] = {}
        self._spellings = spellings or Spellings(0, lambda _: b"")
        self._beams: dict[int, tuple[int, int | None]] = {}  # row -> candidates, log-probabilities
        self._masks = RowMasks(
            max_rows=max_rows,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            spellings=self._spellings,
        )

    def add_row(self, init: RowInit) -> None:
        """Start a row, or resume one whose `token_ids` hold output; replaces its old state."""
        row, sampling = init.row, init.sampling
        self.drop_row(row)
        if sampling.is_greedy:
            self._temperature[row] = 0.0
        else:
            self._temperature[row] = max(sampling.temperature, MIN_TEMPERATURE)
        self._top_k[row] = sampling.top_k if sampling.top_k < self._vocab_size else 0
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seeds[row] = init.seed
        self._num_outputs[row] = len(init.token_ids) - init.num_prompt_tokens
        edits = RowEdits(init, self._eos_token_ids, self._vocab_size)
        if edits.is_needed:
            self._edits[row] = edits
        if sampling.custom_logit_processor is not None:
            name = sampling.custom_logit_processor
            self._processed[row] = RowProcessor(name, self._processors[name], init)
        if sampling.has_filter:
            self._add_filter(row, sampling)
        if sampling.beams is not None:
            num_stops = len({*self._eos_token_ids, *sampling.stop_token_ids})
            self._beams[row] = sampling.beams.num_candidates(num_stops), sampling.logprobs
        elif sampling.logprobs is not None:
            self._logprobs[row] = sampling.logprobs, sampling.logprob_token_ids
        self._masks.add_row(init)
        self._is_plain[row] = not (
            row in self._edits
            or row in self._processed
            or row in self._filters
            or row in self._logprobs
            or row in self._beams
            or self._masks.holds(row)
        )

    def _add_filter(self, row: int, sampling: SamplingParams) -> None:
        self._filters[row] = RowFilter(
            sampling,
            float(self._temperature[row]),
            self._spellings.token_bytes,
            self._eos_token_ids,
        )
        # The filter applies these.
        self._top_k[row], self._top_p[row], self._min_p[row] = 0, 1.0, 0.0

    def drop_row(self, row: int) -> None:
        """Forget a row; dropping an unknown one is harmless."""
        self._edits.pop(row, None)
        self._processed.pop(row, None)
        self._filters.pop(row, None)
        self._logprobs.pop(row, None)
        self._beams.pop(row, None)
        self._masks.drop_row(row)

    def move(self, moves: BeamMoves) -> None:
        """Let rows of beams continue others, all at once."""
        rows, sources = moves.rows.tolist(), moves.sources.tolist()
        token_ids = moves.token_ids.tolist()
        edits, beams = dict(self._edits), dict(self._beams)
        for row, source, token_id in zip(rows, sources, token_ids, strict=True):
            self._beams[row] = beams[source]
            self._temperature[row], self._is_plain[row] = 0.0, False
            if source in edits:
                self._edits[row] = edits[source].after(token_id)
        self._masks.move(rows, sources, token_ids)

    def drop_rows(self) -> None:
        """Forget all rows, also in the middle of a step."""
        self._edits.clear()
        self._processed.clear()
        self._filters.clear()
        self._logprobs.clear()
        self._beams.clear()
        self._prepared = (None, None)
        self._masks.drop_rows()

    def possible_drafts(self, drafts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Return how many of the drafts of each (row, drafts) its constraint does not exclude.

        Only between `finish` and `begin`, of rows that have started.
        """
        return self._masks.possible_drafts(drafts)

    def begin(self, rows: IntArray, drafts: DraftLines | None = None) -> None:
        """Start work of the next `choose` that needs no logits, in another thread."""
        self._masks.begin(rows, drafts)

    def prepare(self, rows: IntArray, drafts: DraftLines | None = None) -> None:
        """Compute the draw parameters of the next `choose`, whose rows and drafts these are."""
        self._prepared = rows, self._draws(rows, None if drafts is None else drafts.offsets)
        self.token_sampler.prepare(self._prepared[1], is_plain=bool(self._is_plain[rows].all()))

    def draws_ahead(self, rows: IntArray, ahead: int) -> Draws | None:
        """Return the parameters to draw drafts of rows [R] with; None when all are greedy.

        ahead:  output tokens between a row's newest one and the draft
        """
        return self._draws(rows, np.full(len(rows), ahead, np.int64))

    def close(self) -> None:
        """End the thread, if there is one."""
        self._masks.close()

    def sample(
        self, logits: Tensor, rows: IntArray, drafts: DraftLines | None = None
    ) -> SampleResult:
        """Sample one token for each of `rows` [R], or several with drafts, and advance the rows.

        logits: [R, V] float32, raw; overwritten
        """
        return self.finish(self.choose(logits, rows, drafts))

    def choose(
        self, logits: Tensor, rows: IntArray, drafts: DraftLines | None = None
    ) -> PendingSample:
        """Start to sample; `finish` must follow before these rows are sampled again.

        logits: [R, V] float32, raw; overwritten
        drafts: if a row has some, and `drafts.rows` is `rows`: a row has a line for each draft, and
                one more
        """
        raw = self._raw_logits(logits, rows)
        beams = self._beam_logits(logits, rows) if self._beams else None
        masks = self._masks.take(rows, drafts)
        if masks is not None:
            self.token_sampler.kernels.mask_tokens(logits, masks.lines, masks.words)
        if self._edits:
            apply_edits(
                logits,
                self._edited(rows, drafts),
                unbanned=frozenset() if masks is None else masks.overruling,
            )
        failed = self._process(logits, rows) if self._processed else {}
        for line, row in enumerate(rows.tolist() if self._filters else ()):
            if row in self._filters:
                self._filters[row].run(logits[line])
        found = None if beams is None else beams.find(logits)
        (prepared, draws), self._prepared = self._prepared, (None, None)
        if prepared is not rows:
            draws = self._draws(rows, None if drafts is None else drafts.offsets)
        chosen = self.token_sampler.choose(logits, draws)
        if drafts is None:
            self._num_outputs[rows] += 1
        return PendingSample(
            rows=rows,
            sampled=chosen,
            logprobs=tuple(
                (lines, self.token_sampler.describe(copied, lines, chosen, *asked))
                for asked, (lines, copied) in raw.items()
            ),
            failed=failed,
            drafts=drafts,
            beams=found,
        )

    def finish(self, pending: PendingSample, gone: Collection[int] = ()) -> SampleResult:
        """Wait for the tokens, and update the rows.

        gone:  rows that were dropped or restarted since; their tokens are meaningless
        """
        rows = pending.rows
        token_ids, faults = pending.sampled.take()
        kept: BoolArray | None = None
        if pending.drafts is not None:
            kept = pending.drafts.kept(token_ids, faults)
            faults = {line: fault for line, fault in faults.items() if kept[line]}
        candidates: dict[int, Candidates] = {}
        if pending.beams is not None:
            candidates = pending.beams.take(self.token_sampler.kernels)
            kept = np.ones(len(rows), np.bool_) if kept is None else kept
            kept[list(candidates)] = False
        row_list = rows.tolist()
        bad_rows = {row_list[line]: fault for line, fault in faults.items()}
        bad_rows |= pending.failed
        new = slice(None) if kept is None else kept
        ends = self._masks.accept(rows[new], token_ids[new], unsampled={*bad_rows, *gone})
        if kept is not None:
            for row, count in ends.cut.items():
                assert pending.drafts is not None
                kept[(pending.drafts.rows == row) & (pending.drafts.offsets >= count)] = False
            rows, token_ids = rows[kept], token_ids[kept]
            if pending.drafts is not None:
                np.add.at(self._num_outputs, rows, 1)
        self._note_tokens(rows, token_ids, gone)
        return SampleResult(
            rows=rows,
            token_ids=token_ids,
            logprobs=_by_row(pending, kept),
            bad_rows=bad_rows | ends.failed,
            completed=ends.completed - bad_rows.keys(),
            candidates={row_list[line]: found for line, found in candidates.items()},
        )

    def _beam_logits(self, logits: Tensor, rows: IntArray) -> BeamLogits | None:
        """Turn logits of beams into log-probabilities, if there are beams among the rows."""
        lines = [
            BeamLine(line, *self._beams[row])
            for line, row in enumerate(rows.tolist())
            if row in self._beams
        ]
        return BeamLogits.begin(logits, lines) if lines else None

    def _process(self, logits: Tensor, rows: IntArray) -> dict[int, RowFault]:
        """Run the processors of `rows` over their logits; return the rows that failed."""
        faults = {
            row: self._processed[row].run(logits[line])
            for line, row in enumerate(rows.tolist())
            if row in self._processed
        }
        return {row: fault for row, fault in faults.items() if fault is not None}

    def _edited(self, rows: IntArray, drafts: DraftLines | None) -> list[tuple[int, RowEdits]]:
        """Return the edits of each edited line; after drafts, as if these were output."""
        edited: list[tuple[int, RowEdits]] = []
        for line, row in enumerate(rows.tolist()):
            if row in self._edits:
                edits = self._edits[row]
                if drafts is not None and drafts.offsets[line]:
                    edits = edited[-1][1].after(int(drafts.draft_ids[line - 1]))
                edited.append((line, edits))
        return edited

    def _draws(self, rows: IntArray, ahead: npt.NDArray[np.int64] | None) -> Draws | None:
        """Return the draw parameters of rows [R]; None when all are greedy.

        ahead:  [R] output tokens between the newest one of a row and the drawn one; None = none
        """
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        positions = self._num_outputs[rows]
        if ahead is not None:
            positions = positions + ahead
        return Draws(
            temperature=temperature,
            keys=random_bits(self._seeds[rows], positions.astype(np.uint64)),
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
        )

    def _raw_logits(
        self, logits: Tensor, rows: IntArray
    ) -> dict[_Asked, tuple[TokenArray, Tensor]]:
        """Copy the logits whose log-probabilities are requested, by what is asked of them."""
        wanted: dict[_Asked, list[int]] = {}
        if self._logprobs:
            for line, row in enumerate(rows.tolist()):
                if row in self._logprobs:
                    wanted.setdefault(self._logprobs[row], []).append(line)
        return {
            asked: (np.array(lines), logits[to_device(np.array(lines), logits.device)])
            for asked, lines in wanted.items()
        }

    def _note_tokens(self, rows: IntArray, token_ids: TokenArray, gone: Collection[int]) -> None:
        if gone:
            stays = ~np.isin(rows, list(gone))
            rows, token_ids = rows[stays], token_ids[stays]
        readers: tuple[Mapping[int, RowEdits | RowProcessor], ...] = (self._edits, self._processed)
        for by_row in readers:
            if by_row:
                for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                    if row in by_row:
                        by_row[row].add_token(token_id)


def _by_row(pending: PendingSample, kept: BoolArray | None) -> dict[int, LogprobRows]:
    """Log-probabilities of the sampled tokens: row -> a line for each, one if `kept` is None."""
    described = {}
    for lines, logprobs in pending.logprobs:
        together = logprobs.take()
        spans: dict[int, tuple[int, int]] = {}
        for place, line in enumerate(lines.tolist()):
            if kept is None or kept[line]:
                row = int(pending.rows[line])
                spans[row] = spans.get(row, (place, 0))[0], place + 1
        for row, (first, last) in spans.items():
            described[row] = together.part(slice(first, last))
    return described


def _mix64(bits: SeedArray) -> SeedArray:
    """Scramble 64 bits so that neighbouring inputs give unrelated outputs; wraps on overflow."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
