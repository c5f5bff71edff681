"""Trial of a compiled grammar before it is used for decoding.

Other requests wait while the next tokens are computed, so this must be fast everywhere. An
ambiguous grammar may take seconds per token: a short random walk finds most of them, and
`BaseMatcher` stops the others.
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
# Processor time of a walk in addition to the allowance of its tokens.
RESERVE_S = 0.025


class Compiler(Protocol):
    """A backend's part in the compiler process."""

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError."""


class Loader(Protocol):
    """A backend's part in the engine's process."""

    def load(self, data: bytes) -> Grammar:
        """Load what a compiler wrote."""


class TryingCompiler:
    """A compiler that tries out what it has compiled."""

    def __init__(self, compiler: Compiler, loader: Loader, vocab_size: int) -> None:
        self._compiler = compiler
        self._loader = loader
        self._vocab_size = vocab_size

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError, also if the grammar would be too slow."""
        data = self._compiler.compile(source)
        try_out(self._loader.load(data), self._vocab_size)
        return data


def try_out(grammar: Grammar, vocab_size: int) -> None:
    """Raise ConstraintError if no token may start a match, or if steps take too long."""
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
