"""Which tokens one row's constraint allows next.

An output has phases: the rewritten end of the prompt (token healing), reasoning, answer. Reasoning
is free until its budget is spent; then its end is forced. An answer is free or follows a grammar. A
constraint reads every token, so a row that restarts after preemption replays its output into it.
Drafts are tried: the constraint goes on as if they were output, and back. Knows masks and bytes; no
logits, no other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from remora.engine.sampling.constraint_thread import ConstraintFailed
from remora.engine.tokens.token_text import Spellings
from remora.engine.types import (
    Forkable,
    MaskWords,
    Matcher,
    ReasoningBudget,
    Reversible,
    RowInit,
)


def mask_words(token_ids: Iterable[int], vocab_size: int) -> MaskWords:
    """Return a mask [ceil(vocab_size / 32)] that allows these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[[token_id for token_id in token_ids if token_id < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _reversible(matcher: Matcher | None) -> Reversible | None:
    return matcher if isinstance(matcher, Reversible) else None


def _holds(words: MaskWords, token_id: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(int(words[token_id >> 5]) >> (token_id & 31) & 1)


def is_constrained(init: RowInit) -> bool:
    """Return whether a row needs a RowConstraint."""
    return bool(
        init.grammar is not None
        or init.reasoning is not None
        or init.healed_id is not None
        or init.sampling.allowed_token_ids
        or init.sampling.first_token_ids
    )


class RowConstraint:
    """The constraint of one row, and the phase that its output is in.

    is_complete:  the grammar is complete; nothing may follow
    can_draft:    whether drafts can be tried
    Raises ConstraintFailed, as `accept` does.
    """

    def __init__(
        self,
        init: RowInit,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        spellings: Spellings,
        *,
        can_draft: bool = True,
    ) -> None:
        sampling = init.sampling
        self.is_complete = False
        self._init = init
        self._new_ids: list[int] = []
        self._vocab_size = vocab_size
        self._spellings = spellings
        self._eos_ids = frozenset(eos_token_ids)
        self._stop_ids = self._eos_ids.union(sampling.stop_token_ids)
        self._matcher = None if init.grammar is None else init.grammar.matcher()
        self._reversible = _reversible(self._matcher)
        self.can_draft = can_draft and (self._matcher is None or self._reversible is not None)
        self._healing = None if init.healed_id is None else _Healing(init.healed_id, spellings)
        self._reasoning = None if init.reasoning is None else _Reasoning(init.reasoning)
        self._allowed = self._words_of(sampling.allowed_token_ids)
        self._first = self._words_of(sampling.first_token_ids)
        has_moved = False
        for token_id in init.token_ids[init.num_prompt_tokens :].tolist():
            has_moved = self._take(token_id)
        if has_moved:
            self._update_complete()

    @property
    def restricts(self) -> bool:
        """Whether some token is not allowed next."""
        if self._allowed is not None or self._first is not None or self._healing is not None:
            return True
        if self._reasoning is not None:
            return self._matcher is not None or self._reasoning.forced_id is not None
        return self._matcher is not None

    @property
    def is_spent(self) -> bool:
        """Whether it never restricts a token again."""
        return not self.restricts and self._reasoning is None

    @property
    def overrules_bans(self) -> bool:
        """Whether the next token is forced, even if it is banned otherwise."""
        if self._reasoning is not None:
            return self._reasoning.forced_id is not None
        return self._matcher is not None and self._matcher.is_complete

    def fill(self, words: MaskWords) -> None:
        """Write the mask of allowed tokens into `words` [ceil(vocab_size / 32)]."""
        forced_id = None if self._reasoning is None else self._reasoning.forced_id
        if forced_id is not None:
            words[:] = mask_words([forced_id], self._vocab_size)
            return
        if self._healing is not None:
            words[:] = mask_words(self._healing.next_ids(), self._vocab_size)
        elif self._reasoning is not None and self._matcher is not None:
            # An answer must follow, so the output cannot stop here except by `exit_ids`.
            words[:] = ~mask_words(self._stop_ids - self._reasoning.exit_ids, self._vocab_size)
        elif self._reasoning is None and self._matcher is not None:
            self._matcher.fill(words)
        else:
            words.fill(-1)
        for mask in (self._allowed, self._first):
            if mask is not None:
                words &= mask

    def accept(self, *token_ids: int) -> int:
        """Advance by the next tokens; returns how many, at least one.

        Raises ConstraintFailed if the row cannot continue after the first of them. It stays before
        a later one that it cannot continue after.
        """
        has_moved = self._take(token_ids[0])
        count = 1
        for token_id in token_ids[1:]:
            position = self._save()
            try:
                has_moved = self._take(token_id)
            except ConstraintFailed:
                self._restore(position)
                break
            count += 1
        self._new_ids += token_ids[:count]
        if has_moved:
            self._update_complete()
        return count

    def restarted(self) -> RowInit:
        """Return what would restart the row here."""
        known = np.concatenate([self._init.token_ids, np.array(self._new_ids, np.int64)])
        return replace(self._init, token_ids=known)

    def fork(self, row: int) -> RowConstraint | None:
        """Return the constraint of a row with the same output so far.

        None = its matcher cannot be copied; `restarted` says what would read the output again.
        """
        if self._matcher is not None and not isinstance(self._matcher, Forkable):
            return None
        other = copy(self)
        other._init, other._new_ids = replace(self._init, row=row), [*self._new_ids]
        other._matcher = None if self._matcher is None else self._matcher.fork()
        other._reversible = _reversible(other._matcher)
        other._healing, other._reasoning = copy(self._healing), copy(self._reasoning)
        return other

    def ahead(self, draft_ids: Sequence[int]) -> Iterator[None]:
        """Advance by one draft after another, for a look; goes back in the end.

        Ends before a draft that may not come, or that completes the grammar.
        """
        if not self.can_draft:
            return
        position = self._save()
        try:
            for draft_id in draft_ids:
                if not self._admits(draft_id) or self._is_last(draft_id):
                    return
                yield
        finally:
            self._restore(position)

    def _admits(self, token_id: int) -> bool:
        """Whether a token may come next, for all that is known without the grammar."""
        if self._reasoning is not None and self._reasoning.forced_id is not None:
            return token_id == self._reasoning.forced_id
        if self._healing is not None and token_id not in self._healing.next_ids():
            return False
        masks = (self._allowed, self._first)
        return all(mask is None or _holds(mask, token_id) for mask in masks)

    def _is_last(self, token_id: int) -> bool:
        """Advance by a draft; returns whether nothing may follow it, or not even it may come."""
        try:
            if self._take(token_id):
                self._update_complete()
        except ConstraintFailed:
            return True
        return self.is_complete

    def _save(self) -> _Position:
        matcher = None if self._reversible is None else self._reversible.save()
        return self.is_complete, self._first, copy(self._healing), copy(self._reasoning), matcher

    def _restore(self, position: _Position) -> None:
        self.is_complete, self._first, self._healing, self._reasoning, matcher = position
        if self._reversible is not None:
            self._reversible.restore(matcher)

    def _take(self, token_id: int) -> bool:
        """Advance by the next token; returns whether the grammar has advanced."""
        self._first = None
        if self._healing is not None:
            if not self._healing.accept(token_id):
                self._healing = None
        elif self._reasoning is not None:
            rest = self._reasoning.accept(token_id, self._spellings.token_bytes(token_id))
            if rest is not None:
                self._reasoning = None
                return self._begin_answer(rest)
        elif self._matcher is not None:
            return self._advance(self._matcher, token_id)
        return False

    def _update_complete(self) -> None:
        # After the newest token only: a backend may have to compute a whole mask for this.
        self.is_complete = self._matcher is not None and self._matcher.is_complete

    def _advance(self, matcher: Matcher, token_id: int) -> bool:
        if token_id in self._eos_ids:
            self.is_complete = True
        elif matcher.accept(token_id):
            return True
        elif token_id not in self._stop_ids:
            raise ConstraintFailed(f"its constraint refuses token {token_id}, which it had allowed")
        return False

    def _begin_answer(self, rest: bytes) -> bool:
        """Advance the grammar by the text after the end of reasoning in the same token."""
        text = rest.lstrip()
        if self._matcher is None or not text:
            return False
        token_ids = self._spellings.spell(text)
        if token_ids is None or not all(map(self._matcher.accept, token_ids)):
            raise ConstraintFailed(
                "the token that ended its reasoning also began an answer that its constraint does "
                "not allow"
            )
        return True

    def _words_of(self, token_ids: Sequence[int]) -> MaskWords | None:
        return mask_words(token_ids, self._vocab_size) if token_ids else None


# Whether the grammar is complete, the mask of first tokens, the phases, the matcher's position.
_Position = tuple[bool, "MaskWords | None", "_Healing | None", "_Reasoning | None", object]


class _Healing:
    """The part of the prompt's last token that the output has not rewritten yet."""

    def __init__(self, healed_id: int, spellings: Spellings) -> None:
        self._healed_id = healed_id
        self._spellings = spellings
        self._missing = spellings.token_bytes(healed_id)

    def next_ids(self) -> list[int]:
        if self._healed_id in self._spellings.special_ids:
            return [self._healed_id]
        return self._spellings.starting(self._missing)

    def accept(self, token_id: int) -> bool:
        """Advance by the next token; return whether some text is still missing."""
        self._missing = self._missing[len(self._spellings.token_bytes(token_id)) :]
        return bool(self._missing)


class _Reasoning:
    """Reasoning that has not ended yet."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._end = budget.end.encode()
        self._end_ids = budget.end_ids
        self.exit_ids = budget.exit_ids
        self._left = budget.budget
        self._num_forced = 0
        self._tail = b""

    @property
    def forced_id(self) -> int | None:
        """The token that must come next, once the budget is spent."""
        return self._end_ids[self._num_forced] if self._left == 0 else None

    def accept(self, token_id: int, data: bytes) -> bytes | None:
        """Advance by the next token; once reasoning has ended, return the text after its end."""
        if self._left == 0:
            self._num_forced += 1
        elif self._left is not None:
            self._left -= 1
        text = self._tail + data
        before, end, rest = text.partition(self._end)
        if end:
            return rest
        # The tail may be the beginning of the end text.
        self._tail = before[-(len(self._end) - 1) :] if len(self._end) > 1 else b""
        return b"" if self._num_forced == len(self._end_ids) else None
