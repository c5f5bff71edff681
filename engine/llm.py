"""Offline generation: a model in a plain script, without Ray, HTTP or threads.

    llm = LLM(model="smollm2-135m-instruct")
    for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        show(answer.text)

The engine steps in the caller's thread, so one LLM serves one thread. The first constraint on
outputs starts a process that compiles grammars.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from remora.configs.errors import ConfigError, EngineError, RequestError
from remora.configs.load import parse_args
from remora.configs.sections.engine import EngineSection
from remora.configs.sections.model import ModelSection
from remora.engine.beams.params import BeamParams
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.grammar.service import GrammarService
from remora.engine.launch import build_engine
from remora.engine.protocols import NO_ADAPTERS, Adapting
from remora.engine.tokens.outputs import OutputProcessor
from remora.engine.types import (
    EngineStats,
    FinishReason,
    FloatArray,
    Grammar,
    Output,
    Request,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)

__all__ = [
    "LLM",
    "BeamParams",
    "Completion",
    "Constraint",
    "ConstraintKind",
    "Generation",
    "SamplingParams",
]

Prompt = str | Sequence[int] | FloatArray
PROGRESS_FROM_PROMPTS = 4  # fewer end before a progress bar is useful


@dataclass(slots=True)
class Completion:
    """One of a prompt's n outputs.

    score:  of a beam search's output, by which these are ranked, best first
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None


@dataclass(slots=True)
class Generation:
    """The outputs of one prompt. The properties are those of the first completion.

    prompt_token_ids: none of a prompt given as embeddings
    prompt_logprobs:  one for each prompt token, the first None; when requested
    hidden_states:    [num_tokens - 1, hidden_size] float32, final states of prompt and output; when
                      requested
    """

    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
    hidden_states: FloatArray | None = None

    @property
    def token_ids(self) -> list[int]:
        """Output token ids."""
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        """Output text."""
        return self.completions[0].text

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One for each output token, when requested."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended."""
        return self.completions[0].finish_reason


class LLM:
    """A loaded model.

    `options` are keys of the configuration's `model` and `engine` sections (`dtype`, `kv_memory`,
    `max_running_requests`, ...), and `speculation`, that section; `remora.lora.setup` makes
    `adapting`. Raises ConfigError. Use it from one thread.
    """

    def __init__(
        self,
        model: str,
        *,
        adapting: Adapting = NO_ADAPTERS,
        show_progress: bool = True,
        **options: Any,
    ) -> None:
        self._show_progress = show_progress
        config = parse_args(_sections(model, options))
        built = build_engine(config, adapting=adapting, show_progress=show_progress)
        self.plan = built.plan
        self.tokenizer = built.tokenizer
        self._engine = built.engine
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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        constraint: Constraint | None = None,
    ) -> list[Generation]:
        """Generate for each prompt; results are in the prompts' order.

        A prompt is text, token ids, or an array [num_tokens, hidden_size] of numbers instead of the
        ids' rows in the embedding table.
        `params` and `adapter` are one for all prompts, or one for each; None = the base model.
        Every output that ends with `stop` matches `constraint` as a whole. Raises PromptTooLong or
        another RequestError for an invalid prompt, parameter, adapter or constraint, before
        anything is generated.
        """
        batch = _as_batch(prompts)
        adapters = [adapter] * len(batch) if isinstance(adapter, str | None) else adapter
        grammar = None if constraint is None else self._compile(constraint)
        requests = [
            self._request(prompt, sampling=sampling, grammar=grammar, lora_id=self._lora_id(name))
            for prompt, sampling, name in zip(
                batch, _as_params(params, len(batch)), adapters, strict=True
            )
        ]
        return self._run(requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> Generation:
        """Answer a conversation by the model's chat template; `constraint` as in `generate`."""
        text = self.tokenizer.render_chat([dict(message) for message in messages])
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([prompt], params, constraint=constraint)[0]

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, replacing one of the same name.

        Raises ConfigError if this LLM has no adapter slots, InvalidAdapter if the folder holds no
        adapter that fits; nothing has changed then.
        """
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
        lora_id = self._lora_id(name)
        del self._adapters[name]
        self._engine.adapters.forget(lora_id)
        if self._pool is not None:
            self._pool.discard(lora_id)

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop processes and threads; memory is freed with the object."""
        self._grammars.close()
        self._engine.close()

    def _compile(self, constraint: Constraint) -> Grammar:
        # In a thread, because the caller's may be running an event loop already (notebooks do).
        with ThreadPoolExecutor(1) as thread:
            compiled = self._grammars.compile(constraint, param="constraint")
            return thread.submit(asyncio.run, compiled).result()

    def _lora_id(self, adapter: str | None) -> int:
        if adapter is None:
            return 0
        if adapter not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(
                f"Adapter {adapter!r} is not loaded; loaded are: {known}.", "adapter"
            )
        return self._adapters[adapter]

    def _request(self, prompt: Prompt, **fields: Any) -> Request:
        embeddings = None
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        elif isinstance(prompt, np.ndarray) and prompt.dtype.kind == "f":
            embeddings = PromptEmbeddings(np.array(prompt, dtype=np.float32))
            ids = embeddings.ids
        else:
            ids = list(prompt)
        name = f"offline-{next(self._numbers)}"
        return Request(request_id=name, prompt_ids=ids, embeddings=embeddings, **fields)

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        results = {
            request.request_id: Generation(
                prompt_token_ids=list(request.shown_ids),
                completions=[Completion() for _ in range(request.sampling.n)],
            )
            for request in requests
        }
        tokenizer = self.tokenizer if self.tokenizer.takes_text else None
        texts = {r.request_id: OutputProcessor(r, tokenizer) for r in requests}
        shows = self._show_progress and len(requests) >= PROGRESS_FROM_PROMPTS
        try:
            for request in requests:
                self._engine.add(request)
            with _progress_bar(len(requests), shows) as advance:
                while self._engine.has_work:
                    for event in self._engine.step():
                        advance(self._take(event, texts, results))
        except BaseException:  # refused requests and Ctrl-C too: the engine must be usable again
            self._engine.abort_all()
            raise
        return [results[request.request_id] for request in requests]

    def _take(
        self,
        event: SequenceOutput,
        texts: Mapping[str, OutputProcessor],
        results: Mapping[str, Generation],
    ) -> int:
        """Apply one event; returns 1 if it ended its request."""
        if event.error is not None:
            raise EngineError(f"Request {event.request_id} failed: {event.error}.")
        processor = texts[event.request_id]
        was_finished = processor.is_finished
        for output in processor.process([event]):
            _extend(results[event.request_id], output)
        for index in processor.take_stopped():
            self._engine.abort(event.request_id, index)
        return int(processor.is_finished and not was_finished)


def _sections(model: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {"model": {"path": model}, "engine": {}}
    for name, value in options.items():
        if name == "speculation":
            sections[name] = value
        elif name in ModelSection.model_fields:
            sections["model"][name] = value
        elif name in EngineSection.model_fields:
            sections["engine"][name] = value
        else:
            keys = [*ModelSection.model_fields, *EngineSection.model_fields, "speculation"]
            known = ", ".join(keys)
            raise ConfigError(f"LLM has no option {name!r}; known are: {known}")
    return sections


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind == "f":
        return [prompts] if prompts.ndim == 2 else list(prompts)
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts.", "params")
    return list(params)


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


def _extend(generation: Generation, output: Output) -> None:
    completion = generation.completions[output.index]
    completion.token_ids += output.token_ids
    completion.text += output.text
    completion.finish_reason = output.finish_reason
    completion.stop_reason, completion.score = output.stop_reason, output.score
    if output.logprobs is not None:
        completion.logprobs = [*(completion.logprobs or ()), *output.logprobs]
    if output.prompt_logprobs is not None:
        generation.prompt_logprobs = output.prompt_logprobs
    if output.hidden_states is not None:
        generation.hidden_states = output.hidden_states
    generation.num_cached_tokens = max(generation.num_cached_tokens, output.num_cached_tokens)
