"""Embeddings in a plain script, without Ray and HTTP.

embedder = Embedder(model="all-minilm-l6-v2")
vectors = embedder.embed(["Paris is in France.", "Rome is in Italy."])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from remora.configs.errors import ConfigError, EngineError, InvalidRequest
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.engine.models.locate import locate_model
from remora.engine.pooling.facts import pooling_task
from remora.engine.pooling.launch import BuiltPooling, build_pooling
from remora.engine.pooling.texts import Framer
from remora.engine.pooling.vectors import vector_of
from remora.engine.types import FloatArray, PoolingParams, Request, SamplingParams


class Embedder:
    """A loaded embedding model. Not thread-safe.

    sections:  sections of the configuration, as dicts
    Raises ConfigError.
    """

    def __init__(self, model: str, **sections: Any) -> None:
        given = {**sections, "model": {"path": model, **sections.get("model", {})}}
        self._attach(build_embedder(parse_args(given), show_progress=False))

    @classmethod
    def of(cls, built: BuiltPooling) -> Self:
        """Return the embedder of a model that is loaded."""
        embedder = cls.__new__(cls)
        embedder._attach(built)
        return embedder

    def _attach(self, built: BuiltPooling) -> None:
        self.plan, self.facts = built.plan, built.pooling
        self._engine = built.engine
        self._framer = Framer(built.tokenizer)

    def embed(self, texts: Sequence[str], *, prompt: str | None = None) -> FloatArray:
        """Return the embeddings [num_texts, size]; texts that are too long are truncated.

        prompt:  name of a prompt to prepend; default: the model's default prompt
        Raises EngineError.
        """
        return self.embed_ids(self.tokenize(texts, prompt=prompt))

    def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> list[list[int]]:
        """Return the ids of texts as `embed` embeds them. Raises InvalidRequest."""
        name = self.facts.default_prompt if prompt is None else prompt
        if name is not None and name not in self.facts.prompts:
            known = ", ".join(self.facts.prompts) or "none"
            raise InvalidRequest(f"The model has no prompt {name!r}; it has: {known}.", "prompt")
        before = "" if name is None else self.facts.prompts[name]
        rows = self._framer.rows(
            [before + text for text in texts], max_tokens=self.plan.max_sequence_tokens
        )
        return [list(row.token_ids) for row in rows]

    def embed_ids(self, prompts: Sequence[Sequence[int]]) -> FloatArray:
        """Return the embeddings [num_prompts, size] of token ids. Raises EngineError."""
        for index, ids in enumerate(prompts):
            request = Request(
                request_id=str(index),
                prompt_ids=ids,
                sampling=SamplingParams(max_tokens=1),
                pooling=PoolingParams(),
            )
            self._engine.add(request)
        found: dict[int, FloatArray] = {}
        while self._engine.has_work:
            for output in self._engine.step():
                if output.pooled is None:
                    raise EngineError(f"Text {output.request_id} failed: {output.error}.")
                found[int(output.request_id)] = output.pooled
        vectors = np.stack([found[index] for index in range(len(prompts))])
        return vector_of(vectors, normalize=self.facts.normalize)

    def close(self) -> None:
        """Stop the engine's threads."""
        self._engine.close()


def build_embedder(config: ServeConfig, *, show_progress: bool) -> BuiltPooling:
    """Load an embedding model. Raises ConfigError."""
    path = locate_model(config.model)
    task = pooling_task(path, config.model.task, config.model.config_overrides)
    if task != "embed":
        raise ConfigError(
            f"{config.model.path} has the task {task or 'generate'}; only models that generate or "
            "embed run in a script, serve others with `remora serve`."
        )
    return build_pooling(config, path, task, show_progress=show_progress)
