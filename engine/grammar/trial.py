"""A compiled grammar tried out before anybody decodes with it.

What the next token may be is worked out while others wait, so it must be quick everywhere. Where a
grammar is ambiguous it may take seconds a token: a short walk at random finds most of those. What
it does not find, `BaseMatcher` ends when it is met.
"""

from __future__ import annotations

import random
import time
from typing import Protocol

import numpy as np

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.matching import TOKEN_S, TOKENS_OF_BUDGET, TOO_SLOW
from remora.engine.grammar.prepare import Source
from remora.engine.types import Grammar, MatcherTooSlow

NUM_STEPS = 24
# Processor time of a walk beside what its tokens may take.
RESERVE_S = 0.025


class Compiler(Protocol):
    """What a backend has in the compiler process."""

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError."""
        ...


class Loader(Protocol):
    """What a backend has where grammars are used."""

    def load(self, data: bytes) -> Grammar:
        """Read what a compiler wrote."""
        ...


class TryingCompiler:
    """A compiler that tries out what it has compiled."""

    def __init__(self, compiler: Compiler, loader: Loader, vocab_size: int) -> None:
        self._compiler = compiler
        self._loader = loader
        self._vocab_size = vocab_size

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError, also where using it would be too slow."""
        data = self._compiler.compile(source)
        try_out(self._loader.load(data), self._vocab_size)
        return data


def try_out(grammar: Grammar, vocab_size: int) -> None:
    """Raise ConstraintError where nothing may begin, or steps take too long."""
    scale = max(1.0, vocab_size / TOKENS_OF_BUDGET)
    left_s = RESERVE_S * scale
    rng, matcher = random.Random(0), grammar.matcher()
    words = np.zeros((vocab_size + 31) // 32, np.int32)
    for step in range(NUM_STEPS):
        started_s = time.thread_time()
        try:
            matcher.fill(words)
            ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if len(ids) == 0 and step == 0:
                raise ConstraintError("no text of this model's tokens matches it")
            if len(ids) == 0 or matcher.is_complete:
                return
            matcher.accept(int(rng.choice(ids)))
        except MatcherTooSlow as error:
            raise ConstraintError(str(error)) from None
        left_s += TOKEN_S * scale - (time.thread_time() - started_s)
        if left_s < 0:
            raise ConstraintError(TOO_SLOW)
