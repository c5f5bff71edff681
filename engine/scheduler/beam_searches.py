"""Beam searches between steps: which beams go on, on which rows and pages, and what comes of them.

A search starts as one sequence, which computes the prompt; its mates hold the rows of the other
beams. Beams compute in lockstep: when all have candidates, the search chooses their continuations.
A beam with several continuations is shared: the first stays in its row, the others move to rows
whose beams have none. Knows sequences; no scheduling policy, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field, replace

import numpy as np

from remora.configs.errors import InvariantViolated
from remora.engine.beams.moves import NO_COPIES, BeamMoves, join_moves
from remora.engine.beams.search import Beam, BeamSearch, Finished
from remora.engine.kv.cache import PageTable
from remora.engine.sampling.logprobs import concat_logprobs
from remora.engine.scheduler.in_flight import InFlightStep, holds
from remora.engine.scheduler.outputs import output_of
from remora.engine.scheduler.sequence import Sequence
from remora.engine.tokens.output_text import OutputText
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import (
    NO_CANDIDATES,
    NO_TOKEN_LEFT,
    NOT_FINITE,
    Candidates,
    FinishReason,
    LogprobRows,
    Request,
    RowFault,
    SequenceOutput,
    StepResult,
)


@dataclass(slots=True, kw_only=True)
class _Search:
    """A search that has rows.

    beams:      sequences of the search's beams, in its order
    idle:       sequences whose rows no beam uses
    found:      candidates of beams that have some
    fault:      of the beam that failed last
    moves:      for the next plan, with the pages that beams get there
    """

    root: Sequence
    search: BeamSearch
    beams: list[Sequence]
    idle: list[Sequence]
    found: dict[Sequence, Candidates] = field(default_factory=dict)
    fault: RowFault = NO_TOKEN_LEFT
    moves: BeamMoves | None = None
    new_pages: dict[Sequence, list[int]] = field(default_factory=dict)

    @property
    def mates(self) -> list[Sequence]:
        """All sequences but the first."""
        return [seq for seq in (*self.beams, *self.idle) if seq is not self.root]


class BeamSearches:
    """The beam searches of one engine that have started."""

    def __init__(self, eos_token_ids: Set[int], tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer`: None = no stop text is searched."""
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._searches: dict[Sequence, _Search] = {}

    def start(self, root: Sequence) -> list[Sequence]:
        """Begin the search of a sequence that starts, if it wants one; returns its mates."""
        sampling, pages = root.request.sampling, root.beams
        if sampling.beams is None or pages is None:
            return []
        constrained = root.request.grammar is not None
        search = BeamSearch(
            sampling.beams,
            stop_ids=sampling.stop_ids(self._eos_token_ids, constrained=constrained),
            max_tokens=root.max_tokens,
            text=self._text_of(root.request),
        )
        mates = [
            # Without tokens, so that nothing is pending.
            replace(
                root,
                index=index,
                token_ids=[],
                num_prompt_tokens=0,
                table=PageTable(),
                num_computed=0,
                num_starts=0,
                row=None,
                adapter_slot=0,
                prompt_logprob_parts=[],
                hidden_parts=[],
            )
            for index in range(1, sampling.beams.width)
        ]
        self._searches[root] = _Search(root=root, search=search, beams=[root], idle=mates)
        return mates

    def _text_of(self, request: Request) -> OutputText | None:
        is_searched = request.sampling.stop or request.sampling.stop_regex
        if self._tokenizer is None or not is_searched:
            return None
        return OutputText(request, self._tokenizer)

    def end(self, root: Sequence) -> list[Sequence]:
        """Forget the search of a sequence that ends or is preempted; returns its mates."""
        search = self._searches.pop(root, None)
        return [] if search is None else search.mates

    def take_moves(self) -> tuple[BeamMoves | None, dict[Sequence, list[int]]]:
        """Return the moves since the last plan, and the pages that each beam gets after them."""
        moves, new_pages = [], dict[Sequence, list[int]]()
        for search in self._searches.values():
            if search.moves is not None:
                moves.append(search.moves)
                new_pages |= search.new_pages
                search.moves, search.new_pages = None, {}
        return join_moves(moves), new_pages

    def apply(
        self, step: InFlightStep, result: StepResult
    ) -> Iterator[tuple[Sequence, list[SequenceOutput]]]:
        """Take in a step's candidates, and advance searches.

        Yields the first sequence of each search that advances; its outputs if the search ends.
        """
        if not self._searches:
            return
        touched: dict[int, _Search] = {}
        by_seq = {seq: search for search in self._searches.values() for seq in search.beams}
        for row, (seq, start) in step.rows.items():
            search = by_seq.get(seq)
            fault = result.bad_rows.get(row)
            if search is None or not holds(seq, start):
                continue
            if fault is None and row not in result.candidates:
                continue  # a part of the prompt
            seq.num_pending_outputs -= 1
            touched[search.root.order] = search
            search.found[seq] = result.candidates.get(row, NO_CANDIDATES)
            if fault == NOT_FINITE:
                search.found.clear()
                yield search.root, [_failed(search.root, NOT_FINITE)]
            elif fault is not None:  # other beams may go on
                search.found[seq], search.fault = NO_CANDIDATES, fault
        for search in touched.values():
            if search.found and len(search.found) == len(search.beams):
                yield search.root, self._advance(search)

    def _advance(self, search: _Search) -> list[SequenceOutput]:
        """Choose the next tokens of all beams; returns the outputs if none goes on."""
        found, search.found = search.found, {}
        search.search.advance([found[seq] for seq in search.beams])
        if not search.search.is_done:
            _move(search, search.search.beams)
            return []
        root, count = search.root, search.root.request.sampling.n
        finished = search.search.best(count)
        if not finished:
            return [_failed(root, search.fault)]
        outputs = [_output(root, index, each) for index, each in enumerate(finished)]
        # A constraint may allow fewer outputs than were asked for.
        outputs += [_nothing(root, index) for index in range(len(finished), count)]
        return outputs

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless each search's pages are those of its beams."""
        for root, search in self._searches.items():
            if root.beams is None or len(search.mates) + 1 != root.num_rows:
                raise InvariantViolated("a beam search has lost a row")
            root.beams.check_integrity(seq.table for seq in search.beams)


def _move(search: _Search, beams: SequenceABC[Beam]) -> None:
    """Let sequences continue as these beams."""
    pages, parents = search.root.beams, search.beams
    assert pages is not None
    if not pages.has_begun:
        search.root.table = pages.begin(search.root.table)
    staying = {beam.parent: place for place, beam in reversed([*enumerate(beams)])}
    for place, seq in enumerate(parents):
        if place not in staying:
            pages.drop(seq.table)
            _rest(seq)
            search.idle.append(seq)
    num_computed = parents[beams[0].parent].num_computed
    moved: list[Sequence] = []
    sources: list[Sequence] = []
    copies: list[tuple[int, int]] = []
    search.new_pages = {}
    for place, beam in enumerate(beams):
        seq = source = parents[beam.parent]
        if staying[beam.parent] != place:
            seq = search.idle.pop()
            seq.table, copied = pages.share(source.table, num_computed)
            seq.token_ids = [*source.token_ids[:num_computed]]
            seq.num_computed, seq.num_prompt_tokens = num_computed, source.num_prompt_tokens
            if copied is not None:
                copies.append(copied)
                search.new_pages[seq] = [copied[1]]
        moved.append(seq)
        sources.append(source)
    for seq, beam in zip(moved, beams, strict=True):
        seq.token_ids.append(beam.token_id)
        if new := pages.extend(seq.table, num_computed + 1):
            search.new_pages[seq] = new
    search.beams = moved
    search.moves = BeamMoves(
        rows=_rows(moved),
        sources=_rows(sources),
        token_ids=np.array([beam.token_id for beam in beams], np.int64),
        num_kept=np.array(
            [len(seq.table.pages) - len(search.new_pages.get(seq, ())) for seq in moved], np.int32
        ),
        copies=np.array(copies, np.int32).T if copies else NO_COPIES,
    )


def _rest(seq: Sequence) -> None:
    """Let a sequence hold its row and nothing else."""
    seq.token_ids, seq.table = [], PageTable()
    seq.num_computed = seq.num_prompt_tokens = 0


def _rows(sequences: Iterable[Sequence]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([seq.row for seq in sequences], np.int32)


def _failed(root: Sequence, fault: RowFault) -> SequenceOutput:
    return replace(output_of(root, error=fault), finish_reason=FinishReason.ABORT)


def _nothing(root: Sequence, index: int) -> SequenceOutput:
    return replace(output_of(root), index=index, finish_reason=FinishReason.STOP)


def _output(root: Sequence, index: int, finished: Finished) -> SequenceOutput:
    steps = finished.steps()
    token_ids = tuple(step.token_id for step in steps)
    lines = [
        _line(step.candidates.logprobs, step.place)
        for step in steps
        if step.candidates.logprobs is not None
    ]
    output = output_of(
        root,
        token_ids=token_ids,
        logprobs=concat_logprobs(lines) if lines else None,
        prompt_logprobs=tuple(root.prompt_logprob_parts) if index == 0 else (),
        stop_token_id=token_ids[-1] if finished.end == "stop_token" else None,
    )
    reason = FinishReason.LENGTH if finished.end == "length" else FinishReason.STOP
    return replace(output, index=index, finish_reason=reason, score=finished.score)


def _line(logprobs: LogprobRows, place: int) -> LogprobRows:
    return logprobs.part(slice(place, place + 1))


def every_output(output: SequenceOutput, seq: Sequence) -> list[SequenceOutput]:
    """Return the end of a search for each of its outputs; of another sequence, its own."""
    if seq.beams is None:
        return [output]
    return [replace(output, index=index) for index in range(seq.request.sampling.n)]
