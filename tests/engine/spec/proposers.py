"""Proposers and controllers for tests, which check how they are used."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from remora.engine.spec.speculation import PossibleDrafts, Speculation
from remora.engine.types import Namespace
from tests.engine.fakes import VOCAB, next_token

Guess = Callable[[list[int], int], list[int]]


class GuessingProposer:
    """Drafts whatever a function of known tokens and the most drafts returns."""

    def __init__(self, guess: Guess) -> None:
        self.known: dict[int, list[int]] = {}
        self.num_asked = 0
        self._guess = guess

    def begin(self, key: int, token_ids: Sequence[int], namespace: Namespace) -> None:
        assert key not in self.known
        self.known[key] = list(token_ids)

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        assert len(token_ids) > 0
        self.known[key] += token_ids

    def propose(self, rows: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        assert all(limit > 0 for _, limit in rows)
        self.num_asked += len(rows)
        return [self._guess(self.known[key], limit) for key, limit in rows]

    def end(self, key: int) -> None:
        del self.known[key]


class FixedController:
    """Allows the same number of drafts always."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.counts: list[tuple[int, int]] = []
        self.num_steps = self.num_predicted = 0
        self.drafting: list[tuple[int, float]] = []
        self.open: set[int] = set()

    def limit(self, key: int, num_rows: int, *, is_free: bool = False) -> int:
        assert num_rows > 0
        self.open.add(key)
        return self.most

    def observe(
        self, key: int, proposed: int, accepted: int, *, is_predicted: bool = False
    ) -> None:
        assert key in self.open
        assert 0 <= accepted <= proposed <= self.most
        self.counts.append((proposed, accepted))
        self.num_predicted += is_predicted

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        assert num_tokens > 0
        assert seconds >= 0
        self.num_steps += 1

    def observe_drafting(self, num_drafts: int, seconds: float) -> None:
        assert num_drafts > 0
        assert seconds > 0
        self.drafting.append((num_drafts, seconds))

    def end(self, key: int) -> None:
        self.open.remove(key)


def make_speculation(
    guess: Guess,
    most: int = 4,
    *,
    controller: FixedController | None = None,
    vocab_size: int = VOCAB,
    possible_drafts: PossibleDrafts | None = None,
) -> Speculation:
    """Speculation with the end of sequence of `fakes.py`."""
    return Speculation(
        GuessingProposer(guess),
        controller or FixedController(most),
        source="guess",
        max_drafts=most,
        vocab_size=vocab_size,
        eos_token_ids=[0],
        possible_drafts=possible_drafts,
    )


def replaying(texts: Sequence[list[int]], every: int) -> Guess:
    """What followed the same tokens in one of the texts; a draft in `every` is another token."""

    def guess(known: list[int], limit: int) -> list[int]:
        found = next((text for text in texts if text[: len(known)] == known), known)
        return [
            token if (len(known) + place) % every else token ^ 1
            for place, token in enumerate(found[len(known) : len(known) + limit])
        ]

    return guess


def oracle(known: list[int], limit: int) -> list[int]:
    """What the fake model generates without an adapter."""
    drafts: list[int] = []
    for _ in range(limit):
        drafts.append(next_token([*known, *drafts]))
    return drafts


def often_right(known: list[int], limit: int) -> list[int]:
    """The oracle, of whose drafts one in three is wrong."""
    return [
        draft if (len(known) + place) % 3 else draft % (VOCAB - 1) + 1
        for place, draft in enumerate(oracle(known, limit))
    ]


def constant(known: list[int], limit: int) -> list[int]:
    """The same token always."""
    return [7] * limit


def at_random(known: list[int], limit: int) -> list[int]:
    """Any tokens, of any number that is allowed."""
    random_ids = random.Random(sum(known))
    return [random_ids.randrange(VOCAB) for _ in range(random_ids.randrange(limit + 1))]


def hostile(known: list[int], limit: int) -> list[int]:
    """Too many drafts, with ids that do not exist and ends of sequence among right ones."""
    drafts = oracle(known, limit + 3)
    drafts[len(known) % len(drafts)] = (-1, VOCAB, 2**40, 0)[len(known) % 4]
    return drafts


def any_of_them(known: list[int], limit: int) -> list[int]:
    """One of the others."""
    return GUESSES[sum(known) % len(GUESSES)](known, limit)


GUESSES = (oracle, often_right, constant, at_random, hostile)
