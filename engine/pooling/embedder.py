"""Embeddings in a plain script, without Ray and HTTP.

embedder = Embedder(model="all-minilm-l6-v2")
vectors = embedder.embed(["Paris is in France.", "Rome is in Italy."])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from remora.configs.errors import ConfigError, EngineError
from remora.configs.load import parse_args
from remora.engine.models.locate import locate_model
from remora.engine.pooling.facts import pooling_task
from remora.engine.pooling.launch import build_pooling
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
        config = parse_args(given)
        path = locate_model(config.model)
        task = pooling_task(path, config.model.task, config.model.config_overrides)
        if task != "embed":
            raise ConfigError(
                f"{model} has the task {task or 'generate'}; Embedder needs an embedding model."
            )
        built = build_pooling(config, path, task, show_progress=False)
        self.plan, self.facts = built.plan, built.pooling
        self._engine = built.engine
        self._framer = Framer(built.tokenizer)

    def embed(self, texts: Sequence[str], *, prompt: str | None = None) -> FloatArray:
        """Return the embeddings [num_texts, size]; texts that are too long are truncated.

        prompt:  name of a prompt to prepend; default: the model's default prompt
        Raises EngineError.
        """
        name = self.facts.default_prompt if prompt is None else prompt
        before = "" if name is None else self.facts.prompts[name]
        rows = self._framer.rows(
            [before + text for text in texts], max_tokens=self.plan.max_sequence_tokens
        )
        for index, row in enumerate(rows):
            request = Request(
                request_id=str(index),
                prompt_ids=row.token_ids,
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
        vectors = np.stack([found[index] for index in range(len(rows))])
        return vector_of(vectors, normalize=self.facts.normalize)

    def close(self) -> None:
        """Stop the engine's threads."""
        self._engine.close()
