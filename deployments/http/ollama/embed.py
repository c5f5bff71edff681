"""Ollama's /api/embed and /api/embeddings: bodies become those of /v1/embeddings."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from remora.deployments.http.core.field_names import in_callers_words, renames
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.ollama.bodies import EmbedBody, EmbedPromptBody
from remora.deployments.http.ollama.generate import check_name
from remora.deployments.http.pooling.embeddings import EmbeddingsBody, prepare_embeddings
from remora.deployments.http.pooling.requests import PoolingJob
from remora.engine.types import FloatArray

AS_MANY_AS_FIT = -1
PROMPT = renames((r"^input", "prompt"))


async def prepare_embed(server: ServerState, body: EmbedBody, rid: str) -> PoolingJob:
    """Return the job of texts, whose vectors are told in a list. Raises RequestError."""
    started = time.monotonic_ns()
    model = await check_name(server, body.model)
    fields = {
        "model": model,
        "input": body.input,
        "dimensions": body.dimensions,
        "truncate_prompt_tokens": None if body.truncate is False else AS_MANY_AS_FIT,
    }
    job = await prepare_embeddings(server, parse(EmbeddingsBody, fields), rid)

    def tell(results: list[FloatArray]) -> dict[str, Any]:
        answer = job.tell(results)
        return {
            "model": body.model or model,
            "embeddings": [entry["embedding"] for entry in answer["data"]],
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": answer["usage"]["prompt_tokens"],
        }

    return replace(job, tell=tell)


async def prepare_embed_prompt(server: ServerState, body: EmbedPromptBody, rid: str) -> PoolingJob:
    """Return the job of one text. Raises RequestError."""
    model = await check_name(server, body.model)
    fields = {
        "model": model,
        "input": body.prompt,
        "truncate_prompt_tokens": AS_MANY_AS_FIT,
    }
    with in_callers_words(PROMPT):
        job = await prepare_embeddings(server, parse(EmbeddingsBody, fields), rid)
    return replace(
        job, tell=lambda results: {"embedding": job.tell(results)["data"][0]["embedding"]}
    )
