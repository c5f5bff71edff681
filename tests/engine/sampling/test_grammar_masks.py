"""Masks are made beside the forward pass, in one thread, only for constrained rows."""

from __future__ import annotations

import os
import threading
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from remora.engine.sampling import constraint_thread
from remora.engine.sampling.constraint_thread import ConstraintThread
from remora.engine.sampling.grammar_masks import RowMasks
from remora.engine.spec.acceptance import NO_DRAFT, DraftLines
from remora.engine.types import MaskWords, MatcherTooSlow, ReasoningBudget, RowFault
from tests.engine.sampling.constrained import (
    EOS,
    SPELLINGS,
    VOCAB,
    BrokenGrammar,
    ToyGrammar,
    ToyMatcher,
    ids,
)
from tests.engine.sampling.sampled import make_row

ROWS = np.array([0, 1], np.int32)


class SlowMatcher:
    """A grammar and its matcher, which waits for `let_go` in whichever thread fills its mask."""

    is_complete = False
    num_bytes = 0

    def __init__(self, let_go: threading.Event) -> None:
        self.let_go = let_go
        self.threads: list[str] = []

    def matcher(self) -> SlowMatcher:
        return self

    def fill(self, words: MaskWords) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.let_go.wait(30)
        words.fill(1)

    def accept(self, token_id: int) -> bool:
        return True


def make_masks(*grammars: object) -> RowMasks:
    masks = RowMasks(max_rows=4, vocab_size=VOCAB, eos_token_ids=[EOS], spellings=SPELLINGS)
    for row, grammar in enumerate(grammars):
        masks.add_row(make_row(row, [10], grammar=grammar))
    return masks


def test_masks_are_filled_in_another_thread_while_the_caller_goes_on() -> None:
    let_go = threading.Event()
    matcher = SlowMatcher(let_go)
    masks = make_masks(matcher)

    masks.begin(ROWS[:1])
    let_go.set()  # the caller got here, so it was not kept waiting
    taken = masks.take(ROWS[:1])
    masks.close()

    assert matcher.threads == ["remora-constraints"]
    assert taken is not None
    assert taken.words.tolist() == [[1] * len(taken.words[0])]


def test_rows_are_dropped_once_the_masks_that_were_begun_are_filled() -> None:
    let_go = threading.Event()
    matcher = SlowMatcher(let_go)
    masks = make_masks(matcher, None)
    masks.begin(ROWS)
    let_go.set()

    masks.drop_rows()

    assert len(matcher.threads) == 1
    assert not masks.holds(0)
    assert masks.take(ROWS) is None
    masks.add_row(make_row(0, [10], grammar=ToyGrammar(("a",))))
    masks.begin(ROWS[:1])
    assert masks.take(ROWS[:1]) is not None
    masks.close()


def test_without_constrained_rows_nothing_starts() -> None:
    masks = make_masks(None, None)
    before = threading.active_count()

    masks.begin(ROWS)

    assert masks.take(ROWS) is None
    assert threading.active_count() == before


def test_lines_are_those_of_the_rows_that_are_restricted() -> None:
    masks = make_masks(None, ToyGrammar(("a",)))

    taken = masks.take(np.array([1, 0], np.int32))

    assert taken is not None
    assert taken.lines.tolist() == [0]
    assert not taken.overruling


def test_a_row_that_failed_when_it_started_has_no_token_until_it_is_dropped() -> None:
    class Unmatched(ToyGrammar):
        def matcher(self) -> Any:
            raise RuntimeError("no matcher")

    masks = make_masks(None, Unmatched(()))

    taken = masks.take(ROWS)
    ends = masks.accept(ROWS, np.array([10, 11]))
    masks.drop_row(1)

    assert taken is not None
    assert taken.lines.tolist() == [1]
    assert not taken.words.any()
    assert ends.failed == {1: RowFault("its constraint failed: no matcher")}
    assert masks.take(ROWS) is None


def test_a_grammar_that_is_complete_is_told_once_with_its_token() -> None:
    masks = make_masks(ToyGrammar(("a",)), BrokenGrammar(after=5))

    ends = masks.accept(ROWS, np.array([ids("a")[0], 10]))

    assert ends.completed == {0}
    assert not ends.failed


class Panic(BaseException):
    """As pyo3 raises where native code panics: no Exception."""


@pytest.mark.parametrize("fails", ["fill", "accept"])
def test_a_panic_of_native_code_ends_its_row_alone(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    let_go.set()
    matcher = SlowMatcher(let_go)

    def panic(_: object) -> bool:
        raise Panic("boom")

    monkeypatch.setattr(matcher, fails, panic)
    masks = make_masks(matcher, ToyGrammar(("a",)))

    masks.take(ROWS)
    ends = masks.accept(ROWS, np.array([10, ids("a")[0]]))
    masks.close()

    assert ends.failed == {0: RowFault("its constraint failed: boom")}
    assert ends.completed == {1}


def spin(let_go: threading.Event) -> bool:
    """Keep the processor busy until it is let go."""
    while not let_go.is_set():
        pass
    return True


class HangingMatcher(SlowMatcher):
    """Keeps the processor busy until it is let go, and writes then."""

    def fill(self, words: MaskWords) -> None:
        spin(self.let_go)
        words.fill(7)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_that_takes_too_long_is_left_and_the_others_go_on(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_thread, "MAX_STEP_S", 0.05)
    let_go, quick = threading.Event(), threading.Event()
    quick.set()
    matchers: list[SlowMatcher] = [SlowMatcher(quick) for _ in range(3)]
    matchers[place] = HangingMatcher(let_go)
    masks = make_masks(*matchers)
    all_rows = np.arange(3, dtype=np.int32)

    masks.begin(all_rows)
    taken = masks.take(all_rows)
    ends = masks.accept(all_rows, np.array([10, 11, 12]))

    assert taken is not None
    first = [int(line[0]) for line in taken.words]
    assert first == [0 if row == place else 1 for row in range(3)]
    assert ends.failed.keys() == {place}
    assert ends.failed[place].of_request
    assert "more than" in ends.failed[place].reason

    # The thread that was left writes late; by then its row's place is another's.
    masks.drop_row(place)
    again = masks.take(all_rows)
    let_go.set()
    assert again is not None
    assert [int(line[0]) for line in again.words] == [1, 1]
    masks.close()


def test_many_rows_that_hang_have_less_time_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_thread, "MAX_STEP_S", 0.2)
    monkeypatch.setattr(constraint_thread, "MAX_TOTAL_S", 0.3)
    let_go = threading.Event()
    work = ConstraintThread().begin([(row, partial(spin, let_go)) for row in range(4)])
    spent = []

    thread = ConstraintThread()
    begin = thread.begin

    def noting(steps: Any, spent_s: float = 0.0) -> Any:
        spent.append(spent_s)
        return begin(steps, spent_s)

    monkeypatch.setattr(thread, "begin", noting)
    faults, is_left = thread.finish(work)
    let_go.set()

    assert is_left
    assert faults.keys() == {0, 1, 2, 3}
    took = np.diff([0.0, *spent])
    assert took[0] >= 0.2
    assert all(took[2:] < 0.15)


def test_a_thread_that_is_left_has_only_what_others_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constraint_thread, "MAX_STEP_S", 0.05)
    let_go = threading.Event()
    ids_of_threads: list[int] = []

    def hang() -> None:
        ids_of_threads.append(threading.get_native_id())
        spin(let_go)

    thread = ConstraintThread()
    _, is_left = thread.finish(thread.begin([(0, hang)]))
    niceness = os.getpriority(os.PRIO_PROCESS, ids_of_threads[0])
    let_go.set()

    assert is_left
    assert niceness == constraint_thread.ABANDONED_NICENESS
    assert os.getpriority(os.PRIO_PROCESS, 0) < niceness


def test_a_token_that_takes_too_long_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_thread, "MAX_STEP_S", 0.05)
    let_go = threading.Event()
    hanging = SlowMatcher(let_go)
    monkeypatch.setattr(hanging, "accept", lambda _: spin(let_go))
    masks = make_masks(hanging, ToyGrammar(("a",)))

    ends = masks.accept(ROWS, np.array([ids("a")[0], ids("a")[0]]))
    let_go.set()

    assert ends.failed.keys() == {0}
    assert ends.completed == {1}
    masks.close()


def lines_of(drafts: list[list[int]]) -> DraftLines:
    """The lines of rows 0, 1 and so on with these drafts."""
    counts = [1 + len(each) for each in drafts]
    return DraftLines(
        rows=np.repeat(np.arange(len(drafts), dtype=np.int32), counts),
        offsets=np.concatenate([np.arange(count) for count in counts]),
        draft_ids=np.array([token for each in drafts for token in (*each, NO_DRAFT)]),
    )


def allowed(words: MaskWords) -> list[int]:
    """The tokens that a mask allows."""
    return np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def test_each_line_has_the_mask_behind_its_drafts() -> None:
    a, b, c = ids("a", "b", "c")
    word = ToyGrammar(("a", "b", "c"))
    masks = make_masks(None, word, word, BrokenGrammar(after=5))
    drafts = [[c, c], [a, b], [b, c], [a]]
    lines = lines_of(drafts)

    assert masks.possible_drafts(list(enumerate(drafts))) == [2, 2, 0, 0]
    masks.begin(lines.rows, lines)
    taken = masks.take(lines.rows, lines)
    ends = masks.accept(np.array([1, 1, 1, 2], np.int32), np.array([a, b, c, a]))
    masks.close()

    assert taken is not None
    assert taken.lines.tolist() == list(range(3, 11))
    *found, broken, behind = map(allowed, taken.words)
    starts = ids("a", "ab", "abc")
    assert found == [starts, ids("b"), ids("c"), starts, [], []]
    assert len(broken) >= VOCAB
    assert behind == []  # its matcher cannot go back
    assert ends.completed == {1}
    assert not ends.failed


class LateMatcher(SlowMatcher):
    """Takes its time for the mask behind the first token, and writes it then."""

    def __init__(self, let_go: threading.Event, *, is_broken: bool) -> None:
        super().__init__(let_go)
        self.num_tokens = 0
        self.is_broken = is_broken

    def matcher(self) -> LateMatcher:
        return LateMatcher(self.let_go, is_broken=self.is_broken)

    def fill(self, words: MaskWords) -> None:
        if self.num_tokens == 1 and not self.let_go.is_set():
            if self.is_broken:
                raise MatcherTooSlow("slow")
            spin(self.let_go)
        words.fill(2)

    def accept(self, token_id: int) -> bool:
        self.num_tokens += 1
        return True

    def save(self) -> object:
        return self.num_tokens

    def restore(self, position: object) -> None:
        self.num_tokens = int(str(position))


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_row_that_takes_too_long_behind_a_draft_goes_on_without_drafts(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_thread, "MAX_STEP_S", 0.05)
    let_go = threading.Event()
    masks = make_masks(LateMatcher(let_go, is_broken=is_broken), ToyGrammar(("a", "b")))
    drafts = [[10, 10], ids("a")]
    lines = lines_of(drafts)

    taken = masks.take(lines.rows, lines)
    let_go.set()

    assert taken is not None
    assert [allowed(words)[:1] for words in taken.words] == [[1], [], [], ids("a"), ids("b")]
    ends = masks.accept(ROWS, np.array([10, ids("a")[0]]))
    assert not ends.failed
    assert masks.possible_drafts(list(enumerate([[10], ids("b")]))) == [0, 0]
    again = masks.take(ROWS)
    masks.close()
    assert again is not None
    assert [allowed(words)[:1] for words in again.words] == [[1], ids("b")]


@dataclass(frozen=True)
class CountedGrammar(ToyGrammar):
    """Counts the tokens that its matchers read."""

    reads: list[int] = field(default_factory=list)
    can_fork: bool = True

    def matcher(self) -> ToyMatcher:
        return (ForkingMatcher if self.can_fork else CountedMatcher)(self)


class CountedMatcher(ToyMatcher):
    def accept(self, token_id: int) -> bool:
        assert isinstance(self._grammar, CountedGrammar)
        self._grammar.reads.append(token_id)
        return super().accept(token_id)


class ForkingMatcher(CountedMatcher):
    def fork(self) -> ForkingMatcher:
        return copy(self)


@pytest.mark.parametrize("can_fork", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_rows_that_continue_others_have_their_constraints(can_fork: bool, thinks: bool) -> None:
    grammar = CountedGrammar(("ab", "ab", "abc", "cd", "ef"), can_fork=can_fork)
    plain = ToyGrammar(grammar.steps)
    reasoning = ReasoningBudget(end="<end>", end_ids=tuple(ids("<e", "nd>"))) if thinks else None
    before, read = ids("<", "e", "nd>") if thinks else [], ids("a", "b", "c")
    masks = RowMasks(max_rows=4, vocab_size=VOCAB, eos_token_ids=[EOS], spellings=SPELLINGS)
    for row in range(3):
        # The last two were other beams, which end.
        outputs = [*before, *read[: 3 - row]]
        masks.add_row(make_row(row, [10], outputs, grammar=grammar, reasoning=reasoning))
    grammar.reads.clear()

    masks.move([0, 1, 2], [0, 0, 0], ids("c", "d", "c"))

    assert len(grammar.reads) == (3 if can_fork else 3 + 2 * len(read))
    for row, last in enumerate(ids("c", "d", "c")):
        alone = make_masks()
        alone.add_row(
            make_row(row, [10], [*before, *read, last], grammar=plain, reasoning=reasoning)
        )
        got = masks.take(np.array([row], np.int32))
        wanted = alone.take(np.array([row], np.int32))
        assert got is not None
        assert wanted is not None
        assert allowed(got.words[0]) == allowed(wanted.words[0]) == ids("e", "f")
        alone.close()
    # They go on alone, and each can be moved again.
    masks.accept(ROWS[:1], np.array(ids("e"), np.int64))
    masks.move([2], [1], ids("f"))
    taken = masks.take(np.array([1], np.int32))
    assert taken is not None
    assert allowed(taken.words[0]) == ids("e", "f")
    masks.close()
