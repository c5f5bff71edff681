"""The grammar service of one model: constraints in, compiled grammars out.

Constraints are checked here, compiled in another process and loaded in a thread: the event loop
never waits. Equal constraints are compiled once; grammars and failures are cached within limits. A
few are compiled concurrently, so that a slow one does not delay the others; the rest wait in order
of arrival. The compiler's process starts with the service. This process imports a backend with the
first constraint only: it takes a second, which most servers need for other work while they start.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from remora.configs.errors import EngineError, InvalidRequest, QueueFull
from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar.cache import BoundedCache
from remora.engine.grammar.compiler_process import CompilerProcess
from remora.engine.grammar.constraint import Constraint, ConstraintError
from remora.engine.grammar.prepare import Source, prepare
from remora.engine.grammar.trial import Loader
from remora.engine.grammar.vocabulary import Vocabulary
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import Grammar

# At least two, so that a single slow source delays none; each may take grammar.compile_memory.
NUM_PARALLEL = max(2, min(4, len(os.sched_getaffinity(0))))
MAX_WAITING = 256
FAILURE_CACHE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStats:
    """Counters of the service. `*_total` only grow."""

    num_cached: int
    cached_bytes: int
    num_waiting: int
    hits_total: int
    misses_total: int
    failures_total: int


class GrammarService:
    """Compiles constraints for one model. `compile` may be awaited on any event loop."""

    def __init__(
        self,
        section: GrammarSection,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        marker_ids: Collection[int] = (),
    ) -> None:
        """Prepare; nothing is started yet.

        vocab_size:  of the model, not of the tokenizer
        marker_ids:  control tokens that a grammar may spell by their text
        """
        self._section = section
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(dict.fromkeys(i for i in eos_token_ids if 0 <= i < vocab_size))
        self._marker_ids = tuple(marker_ids)
        self._lock = threading.Lock()
        self._grammars: BoundedCache[Grammar] = BoundedCache(section.cache_memory)
        self._failures: BoundedCache[tuple[str, str | None]] = BoundedCache(FAILURE_CACHE_BYTES)
        self._running: dict[bytes, Future[Grammar]] = {}
        self._hits = self._misses = self._num_failures = 0
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="grammar-checks")
        self._making = threading.Lock()
        self._compiles = ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="grammar-compiles")
        self._process: CompilerProcess | None = None
        self._loader: Loader | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the compiler in the background, so that the first request does not wait for it."""
        if self._section.backend != "none" and self._end_ids and self._tokenizer.takes_text:
            self._compiles.submit(lambda: self._ready().start())

    async def compile(self, constraint: Constraint, *, param: str) -> Grammar:
        """Return the compiled constraint; it may be shared with other requests.

        Raises InvalidRequest, which names `param`, if it cannot be enforced, and QueueFull.
        """
        self._check_enabled(param)
        try:
            source = await asyncio.wrap_future(self._check(constraint))
            compiled = asyncio.wrap_future(self._grammar(source))
            # Other requests may wait for the same grammar: it is compiled even if this call is
            # cancelled, and then the result is not retrieved here.
            compiled.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await asyncio.shield(compiled)
        except ConstraintError as error:
            message = f"{param} cannot be enforced: {error}."
            raise InvalidRequest(message, param, "invalid_grammar", limit=error.limit) from None

    def stats(self) -> GrammarStats:
        """Return the current counters."""
        with self._lock:
            return GrammarStats(
                num_cached=len(self._grammars),
                cached_bytes=self._grammars.num_bytes,
                num_waiting=len(self._running),
                hits_total=self._hits,
                misses_total=self._misses,
                failures_total=self._num_failures,
            )

    def close(self) -> None:
        """End the compiler. Waiting calls fail."""
        with self._lock:
            self._is_closed = True
        process = self._process
        if process is not None:
            process.close()
        for pool in (self._checks, self._compiles):
            pool.shutdown(wait=True, cancel_futures=True)
        if self._process is not None:  # created meanwhile
            self._process.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the grammar compiler has been closed")

    def _check_enabled(self, param: str) -> None:
        if not self._tokenizer.takes_text:
            message = f"{param} cannot be enforced: there is no tokenizer (model.skip_tokenizer)."
            raise InvalidRequest(message, param, "no_tokenizer")
        if self._section.backend == "none":
            message = f"{param} needs constrained output, which is off: set grammar.backend."
            raise InvalidRequest(message, param, "unsupported")
        if not self._end_ids:
            message = f"{param} cannot be enforced: the model has no end-of-sequence token."
            raise InvalidRequest(message, param, "unsupported")

    def _check(self, constraint: Constraint) -> Future[Source]:
        with self._lock:
            self._check_open()
            return self._checks.submit(prepare, constraint, self._section)

    def _grammar(self, source: Source) -> Future[Grammar]:
        """Return the grammar of a source: cached, being compiled, or submitted now."""
        key = hashlib.sha256(f"{source.kind}\0{source.text}".encode()).digest()
        done: Future[Grammar] = Future()
        with self._lock:
            grammar, failure = self._grammars.get(key), self._failures.get(key)
            running = self._running.get(key)
            if grammar is None and failure is None and running is None:
                return self._begin(key, source)
            self._hits += 1
        if grammar is not None:
            done.set_result(grammar)
        elif failure is not None:
            done.set_exception(ConstraintError(failure[0], limit=failure[1]))
        return running or done

    def _begin(self, key: bytes, source: Source) -> Future[Grammar]:
        self._check_open()
        self._misses += 1
        if len(self._running) >= MAX_WAITING:
            raise QueueFull(
                "too many constraints are waiting to be compiled", limit="grammar_queue"
            )
        running = self._compiles.submit(self._make, key, source)
        self._running[key] = running
        return running

    def _make(self, key: bytes, source: Source) -> Grammar:
        """Compile and load one source, and cache the result. Runs in a compiling thread."""
        try:
            compiled = self._ready().compile(source)
            grammar = self._ready_loader().load(compiled)
        except ConstraintError as error:
            with self._lock:
                self._num_failures += 1
                if not (self._is_closed or error.is_passing):
                    known = (str(error), error.limit)
                    self._failures.put(key, known, len(key) + len(str(error)))
            raise
        else:
            with self._lock:
                self._grammars.put(key, grammar, grammar.num_bytes)
            return grammar
        finally:
            with self._lock:
                self._running.pop(key, None)

    def _ready(self) -> CompilerProcess:
        """Return the compiler, created on first use."""
        with self._making:
            self._check_open()
            if self._process is None:
                self._process = CompilerProcess(self._section, self._vocabulary())
            return self._process

    def _ready_loader(self) -> Loader:
        """Return the loader, created on first use."""
        with self._making:
            if self._loader is None:
                self._loader = _loader(self._section, self._vocabulary())
            return self._loader

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(
            self._tokenizer,
            vocab_size=self._vocab_size,
            end_ids=self._end_ids,
            marker_ids=self._marker_ids,
        )


def _loader(section: GrammarSection, vocabulary: Vocabulary) -> Loader:
    if section.backend == "outlines":
        from remora.engine.grammar.outlines_backend import OutlinesLoader

        return OutlinesLoader(vocabulary)
    from remora.engine.grammar.xgrammar_backend import XgrammarLoader

    return XgrammarLoader(vocabulary)
