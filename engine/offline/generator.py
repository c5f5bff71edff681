"""Runs batches of requests in the caller's thread. Knows no forms of prompts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from remora.configs.errors import ConfigError, EngineError, RequestError
from remora.configs.schema import ServeConfig
from remora.engine.grammar.constraint import Constraint
from remora.engine.grammar.service import GrammarService
from remora.engine.launch import build_engine
from remora.engine.offline.ranks import team_of
from remora.engine.offline.results import Completion, Generation
from remora.engine.protocols import NO_ADAPTERS, Adapting
from remora.engine.tokens.outputs import OutputProcessor
from remora.engine.types import Grammar, Request, SequenceOutput

PROGRESS_FROM_PROMPTS = 4  # fewer end before a progress bar is useful


class Generator:
    """A loaded model that generates. Raises ConfigError. Not thread-safe."""

    def __init__(self, config: ServeConfig, adapting: Adapting, *, show_progress: bool) -> None:
        self._team = team_of(config)
        if config.parallel.num_ranks > 1 and adapting is not NO_ADAPTERS:
            raise ConfigError(
                f"parallel.tp_size * parallel.pp_size is {config.parallel.num_ranks}: LLM applies "
                "adapters on one rank only; serve them on several with `remora serve`"
            )
        try:
            built = build_engine(
                config, adapting=adapting, team=self._team, show_progress=show_progress
            )
        except BaseException:
            self._team.close()
            raise
        self.plan = built.plan
        self.tokenizer = built.tokenizer
        self.engine = built.engine
        self._grammars = GrammarService(
            config.grammar,
            built.tokenizer,
            vocab_size=built.facts.vocab_size,
            eos_token_ids=built.tokenizer.eos_token_ids,
        )
        self._pool = built.adapters
        self._adapters = dict(adapting.lora_ids)
        self._numbers = itertools.count()
        self._lora_ids = itertools.count(len(self._adapters) + 1)

    def next_id(self) -> str:
        """Return the name of a new request."""
        return f"offline-{next(self._numbers)}"

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint. Raises InvalidRequest."""
        # In a thread, because the caller's may be running an event loop already (notebooks do).
        with ThreadPoolExecutor(1) as thread:
            compiled = self._grammars.compile(constraint, param="constraint")
            return thread.submit(asyncio.run, compiled).result()

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, replacing one of the same name."""
        if self._pool is None:
            raise ConfigError(
                "this LLM has no adapter slots: make it with adapting = "
                "remora.lora.setup.pooling(...)"
            )
        lora_id = next(self._lora_ids)
        self._pool.prepare(lora_id, folder)
        if name in self._adapters:
            self.unload_adapter(name)
        self._adapters[name] = lora_id

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises RequestError for an unknown name."""
        lora_id = self.lora_id(name)
        del self._adapters[name]
        self.engine.adapters.forget(lora_id)
        if self._pool is not None:
            self._pool.discard(lora_id)

    def lora_id(self, adapter: str | None) -> int:
        """Return the id of an adapter; None = the base model. Raises RequestError."""
        if adapter is None:
            return 0
        if adapter not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(
                f"Adapter {adapter!r} is not loaded; loaded are: {known}.", "adapter"
            )
        return self._adapters[adapter]

    def run(
        self, requests: Sequence[Request], texts: Sequence[str | None], shows: bool | None
    ) -> list[Generation]:
        """Generate for all requests.

        texts:  the prompts as text, where they are known
        shows:  whether to show a progress bar; None = for several prompts
        """
        results = {
            request.request_id: Generation(
                request_id=request.request_id,
                prompt=text,
                prompt_token_ids=list(request.shown_ids),
                completions=[Completion(index=index) for index in range(request.sampling.n)],
            )
            for request, text in zip(requests, texts, strict=True)
        }
        tokenizer = self.tokenizer if self.tokenizer.takes_text else None
        processors = {r.request_id: OutputProcessor(r, tokenizer) for r in requests}
        if shows is None:
            shows = len(requests) >= PROGRESS_FROM_PROMPTS
        try:
            for request in requests:
                self.engine.add(request)
            with _progress_bar(len(requests), shows) as advance:
                while self.engine.has_work:
                    for event in self.engine.step():
                        advance(self._take(event, processors, results))
        except BaseException:  # refused requests and Ctrl-C too: the engine must be usable again
            self.engine.abort_all()
            raise
        return [results[request.request_id] for request in requests]

    def close(self) -> None:
        """Stop processes and threads."""
        self._grammars.close()
        self.engine.close()
        self._team.close()

    def _take(
        self,
        event: SequenceOutput,
        processors: Mapping[str, OutputProcessor],
        results: Mapping[str, Generation],
    ) -> int:
        """Apply one event; returns 1 if it ended its request."""
        if event.error is not None:
            raise EngineError(f"Request {event.request_id} failed: {event.error}.")
        processor = processors[event.request_id]
        was_finished = processor.is_finished
        for output in processor.process([event]):
            results[event.request_id].extend(output)
        for index in processor.take_stopped():
            self.engine.abort(event.request_id, index)
        return int(processor.is_finished and not was_finished)


@contextmanager
def _progress_bar(num_requests: int, shows: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of ended requests; yields the function that advances it."""
    if not shows:
        yield lambda _num_ended: None
        return
    from rich.progress import Progress  # slow to import, and rarely needed

    with Progress(transient=True) as progress:
        bar = progress.add_task("generating", total=num_requests)
        yield lambda num_ended: progress.advance(bar, num_ended)
