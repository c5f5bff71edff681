"""Random walks through grammars: what a model that knows nothing would write."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.grammar.outlines_backend import OutlinesCompiler, OutlinesLoader
from remora.engine.grammar.prepare import Source, prepare
from remora.engine.grammar.vocabulary import Vocabulary
from remora.engine.grammar.xgrammar_backend import XgrammarCompiler, XgrammarLoader
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import Grammar, Matcher

BACKENDS = ("xgrammar", "outlines")
_MAKERS = {
    "xgrammar": (XgrammarCompiler, XgrammarLoader),
    "outlines": (OutlinesCompiler, OutlinesLoader),
}
# All bytes, and some tokens of several; two ends, of which neither is the last id; a padded matrix.
TOKENS = (
    *(bytes([byte]) for byte in range(256)),
    b"",  # END
    *(
        text.encode()
        for text in ('{"', '":', '", "', "é", "日本", "null", "true", "12", "  ", "ab")
    ),
    b"",  # OTHER_END
    "日".encode()[:2],
    b"hello",
)
END, OTHER_END = 256, 267
BYTES = Vocabulary(tokens=(*TOKENS, *([b""] * 30)), end_ids=(END, OTHER_END))


@cache
def vocabulary_of(path: Path) -> Vocabulary:
    """The vocabulary of a checkpoint, one read per session."""
    tokenizer = Tokenizer.load(path)
    ends = tokenizer.eos_token_ids
    return Vocabulary.of(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=ends)


@cache
def _made(backend: str, vocabulary: Vocabulary, is_compact: bool):  # type: ignore[no-untyped-def]
    compiler, loader = _MAKERS[backend]
    return compiler(vocabulary, is_compact=is_compact), loader(vocabulary)


def compile_source(backend: str, source: Source, vocabulary: Vocabulary = BYTES) -> Grammar:
    """Compile in this process."""
    compiler, loader = _made(backend, vocabulary, False)
    grammar: Grammar = loader.load(compiler.compile(source))
    return grammar


def make_grammar(
    backend: str,
    kind: ConstraintKind,
    source: str,
    vocabulary: Vocabulary = BYTES,
    *,
    is_compact: bool = False,
) -> Grammar:
    """Check, rewrite, compile and load, all in this process."""
    section = GrammarSection(backend=backend, json_compact=is_compact)  # type: ignore[arg-type]
    prepared = prepare(Constraint(kind=kind, source=source), section)
    compiler, loader = _made(backend, vocabulary, is_compact)
    grammar: Grammar = loader.load(compiler.compile(prepared))
    return grammar


def allowed(matcher: Matcher, vocabulary: Vocabulary = BYTES) -> set[int]:
    """The ids that a matcher allows next."""
    words = np.full(vocabulary.num_words, 0x55555555, np.int32)
    matcher.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def accepts(grammar: Grammar, text: str | bytes) -> bool:
    """Whether a text, byte by byte, is a whole match."""
    matcher = grammar.matcher()
    data = text.encode() if isinstance(text, str) else text
    return all(matcher.accept(byte) for byte in data) and matcher.accept(END)


def walk(
    grammar: Grammar,
    seed: int,
    vocabulary: Vocabulary = BYTES,
    *,
    max_tokens: int = 400,
    end_chance: float = 0.3,
) -> str | None:
    """Write a text at random; None when it has not come to its end."""
    rng, matcher = random.Random(seed), grammar.matcher()
    ends = set(vocabulary.end_ids)
    written: list[bytes] = []
    for _ in range(max_tokens):
        ids = allowed(matcher, vocabulary)
        assert ids, f"a dead end after {b''.join(written)!r}"
        assert matcher.is_complete == (ids <= ends)
        if matcher.is_complete or (ids & ends and rng.random() < end_chance):
            assert matcher.accept(rng.choice(sorted(ids & ends)))
            return b"".join(written).decode()
        token_id = rng.choice(sorted(ids - ends))
        assert matcher.accept(token_id)
        written.append(vocabulary.tokens[token_id])
    return None


def walks(grammar: Grammar, num: int, vocabulary: Vocabulary = BYTES) -> Iterator[str]:
    """The texts of several walks, those that came to their end; one of them must."""
    texts = [text for seed in range(num) if (text := walk(grammar, seed, vocabulary)) is not None]
    assert texts, "no walk came to its end"
    return iter(texts)
