"""Offline inference: a model in a plain script, without Ray, HTTP or threads.

    with LLM(model="smollm2-135m-instruct") as llm:
        for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            show(answer.prompt, answer.outputs[0].text)

The engine steps in the caller's thread, so one LLM serves one thread. The first constraint on
outputs starts a process that compiles grammars, and each further rank is a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch

from remora.configs.errors import InvalidRequest, RequestError
from remora.engine.beams.params import BeamParams
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.launch import task_of
from remora.engine.offline.generator import Generator
from remora.engine.offline.options import config_of
from remora.engine.offline.prompts import (
    Prompt,
    PromptDict,
    Prompts,
    ReadPrompt,
    as_batch,
    read_prompt,
)
from remora.engine.offline.results import Completion, Embedding, Generation
from remora.engine.pooling.embedder import Embedder, build_embedder
from remora.engine.protocols import NO_ADAPTERS, Adapting
from remora.engine.tokens.hub_tokenizer import transformers_tokenizer
from remora.engine.types import EngineStats, Grammar, Request, SamplingParams

__all__ = [
    "LLM",
    "BeamParams",
    "Completion",
    "Constraint",
    "ConstraintKind",
    "Embedding",
    "Generation",
    "Prompt",
    "PromptDict",
    "SamplingParams",
]

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model, which generates or embeds.

    `options` are keys of the configuration's `model` and `engine` sections (`dtype`, `kv_memory`,
    `max_running_requests`, ...), the sections `speculation`, `parallel`, `grammar`, `pooling` and
    `debug` as mappings, and arguments of vLLM's engine (`max_model_len`, `tensor_parallel_size`,
    `gpu_memory_utilization`, `seed`, ...). `remora.lora.setup` makes `adapting`. Raises
    ConfigError. Use it from one thread; close it, or use it in a `with` statement.
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
        self._torch_threads = torch.get_num_threads()  # of the caller; building changes it
        self._config = config_of(model, options)
        self._generator: Generator | None = None
        self._embedder: Embedder | None = None
        if task_of(self._config) is not None:
            built = build_embedder(self._config, show_progress=show_progress)
            self._embedder = Embedder.of(built)
            self.plan, self.tokenizer = built.plan, built.tokenizer
            return
        self._generator = Generator(self._config, adapting, show_progress=show_progress)
        self.plan, self.tokenizer = self._generator.plan, self._generator.tokenizer

    def __enter__(self) -> Self:
        """Return this LLM."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        adapter: str | Sequence[str | None] | None = None,
        constraint: Constraint | None = None,
    ) -> list[Generation]:
        """Generate for each prompt; results are in the prompts' order.

        A prompt is text, token ids, or an array [num_tokens, hidden_size] of numbers instead of the
        ids' rows in the embedding table; or a mapping with one of `prompt`, `prompt_token_ids` and
        `prompt_embeds`, and optionally a `cache_salt`.
        `params` (vLLM: `sampling_params`) and `adapter` are one for all prompts, or one for each;
        None = the base model. `use_tqdm` shows a progress bar; None = for several prompts.
        Every output that ends with `stop` matches `constraint` as a whole. Raises PromptTooLong or
        another RequestError for an invalid prompt, parameter, adapter or constraint, before
        anything is generated.
        """
        generator = self._generates()
        read = [read_prompt(prompt, self.tokenizer) for prompt in as_batch(prompts)]
        given = _one_of(params, sampling_params)
        return self._generate(generator, read, given, use_tqdm, adapter, constraint)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        adapter: str | Sequence[str | None] | None = None,
        constraint: Constraint | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Generation]:
        """Answer one conversation, or each of several, by the model's chat template.

        Returns one result for each conversation; the other arguments are those of `generate` and of
        the template.
        """
        generator = self._generates()
        read = []
        for each in _conversations(messages):
            text = self.tokenizer.render_chat(
                [dict(message) for message in each],
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
                tools=tools,
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            read.append(ReadPrompt(ids=ids, text=text))
        given = _one_of(params, sampling_params)
        return self._generate(generator, read, given, use_tqdm, adapter, constraint)

    def embed(self, prompts: Prompts, *, use_tqdm: bool | None = None) -> list[Embedding]:
        """Return the embedding of each prompt: text, token ids, or a mapping of one of them.

        The model's default prompt, if it has one, is prepended to texts. `use_tqdm` has no effect.
        Raises InvalidRequest.
        """
        if self._embedder is None:
            raise InvalidRequest(
                f"{self._config.model.path} generates text; load an embedding model to embed.",
                "model",
            )
        read = [_to_embed(prompt, self._embedder) for prompt in as_batch(prompts)]
        if not read:
            return []
        vectors = self._embedder.embed_ids([ids for _, ids in read])
        return [Embedding(text, ids, row) for (text, ids), row in zip(read, vectors, strict=True)]

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer of transformers. Raises ConfigError if it has none.

        `tokenizer`, which the engine uses, has the same tokens and is there for all models.
        """
        return transformers_tokenizer(self._config.model, self.plan.model_path)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, replacing one of the same name.

        Raises ConfigError if this LLM has no adapter slots, InvalidAdapter if the folder holds no
        adapter that fits; nothing has changed then.
        """
        self._generates().load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises RequestError for an unknown name."""
        self._generates().unload_adapter(name)

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._generates().engine.stats()

    def close(self) -> None:
        """Stop processes and threads; memory is freed with the object.

        Torch computes with as many threads again as before the object was made.
        """
        for part in (self._generator, self._embedder):
            if part is not None:
                part.close()
        torch.set_num_threads(self._torch_threads)

    def _generate(
        self,
        generator: Generator,
        prompts: Sequence[ReadPrompt],
        params: Params,
        use_tqdm: bool | None,
        adapter: str | Sequence[str | None] | None,
        constraint: Constraint | None,
    ) -> list[Generation]:
        adapters = [adapter] * len(prompts) if isinstance(adapter, str | None) else adapter
        grammar = None if constraint is None else generator.compile(constraint)
        requests = [
            _request(prompt, generator.next_id(), sampling, grammar, generator.lora_id(name))
            for prompt, sampling, name in zip(
                prompts, _as_params(params, len(prompts)), adapters, strict=True
            )
        ]
        texts = [prompt.text for prompt in prompts]
        shows = use_tqdm if use_tqdm is not None else None if self._show_progress else False
        return generator.run(requests, texts, shows)

    def _generates(self) -> Generator:
        if self._generator is None:
            raise InvalidRequest(
                f"{self._config.model.path} embeds texts and generates none: use embed().", "model"
            )
        return self._generator

    # What follows is used by tests and tools of this repository.

    @property
    def _engine(self) -> Any:
        return self._generates().engine

    def _compile(self, constraint: Constraint) -> Grammar:
        return self._generates().compile(constraint)


def _request(
    prompt: ReadPrompt, name: str, sampling: SamplingParams, grammar: Grammar | None, lora_id: int
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=prompt.ids,
        embeddings=prompt.embeddings,
        cache_salt=prompt.cache_salt,
        sampling=sampling,
        grammar=grammar,
        lora_id=lora_id,
    )


def _one_of(params: Params, sampling_params: Params) -> Params:
    if params is not None and sampling_params is not None:
        raise RequestError(
            "params and sampling_params are two names of one argument; give one.", "params"
        )
    return sampling_params if params is None else params


def _as_params(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts.", "params")
    return list(params)


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    if not messages:
        raise InvalidRequest(
            "messages is empty; it must hold the messages of a conversation, or conversations.",
            "messages",
        )
    if isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))


def _to_embed(prompt: Prompt, embedder: Embedder) -> tuple[str | None, list[int]]:
    """Return the text, if it is known, and the ids of a prompt. Raises InvalidRequest."""
    if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None:
        return prompt.get("prompt"), list(prompt["prompt_token_ids"])
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if isinstance(text, str):
        return text, embedder.tokenize([text])[0]
    if text is None or getattr(text, "ndim", 1) != 1:
        raise InvalidRequest("Only texts and token ids can be embedded.", "prompts")
    return None, [int(token) for token in text]
