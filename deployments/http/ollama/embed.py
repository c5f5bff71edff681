"""Ollama's /api/embed and /api/embeddings, implemented by the endpoint of /v1/embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.core.field_names import in_callers_words, renames
from remora.deployments.http.generation.endpoint import Endpoint, Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.ollama.bodies import EmbedBody, EmbedPromptBody
from remora.deployments.http.ollama.context import check_lengths, too_long
from remora.deployments.http.ollama.generate import check_name

PROMPT = renames((r"^input", "prompt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob(Job):
    """A checked request.

    inner:     the job of /v1/embeddings
    convert:   converts its response to Ollama's format, with `ready_ns`
    ready_ns:  when it was ready for the engine, on the monotonic clock
    """

    inner: Job
    convert: Callable[[Any, int], dict[str, Any]]
    ready_ns: int

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response."""
        return self.convert(await self.inner.result(outputs), self.ready_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob(Job):
    """A body without text, which only loads the model."""

    answer: dict[str, Any]

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response."""
        return self.answer


class Embedder:
    """Prepares the jobs of both paths.

    embeddings:  the endpoint of /v1/embeddings
    """

    def __init__(self, embeddings: Endpoint[Any]) -> None:
        self._embeddings = embeddings

    async def prepare(self, server: ServerState, body: EmbedBody, context: RequestContext) -> Job:
        """Return the job of texts; its response lists the vectors. Raises RequestError."""
        started = time.monotonic_ns()
        model = await check_name(server, body.model)
        if not body.input:
            answer = {"model": body.model or model, "embeddings": []}
            return LoadJob(context=context, requests=(), answer=answer)
        room, is_cut = _room(server, body), body.truncate is not False
        fields = {
            "model": model,
            "input": body.input,
            "dimensions": body.dimensions,
            "truncate_prompt_tokens": room if is_cut else None,
        }
        if not is_cut and server.config.api.prompt_truncation != "none":
            await check_lengths(server, body.input, room)

        def convert(answer: Any, ready_ns: int) -> dict[str, Any]:
            return {
                "model": body.model or model,
                "embeddings": [entry["embedding"] for entry in answer["data"]],
                "total_duration": time.monotonic_ns() - started,
                "load_duration": max(1, ready_ns - started),
                "prompt_eval_count": answer["usage"]["prompt_tokens"],
            }

        job = await self._job(server, fields, context, convert)
        longest = max((len(request.prompt_ids) for request in job.requests), default=0)
        if longest > room:
            raise too_long(longest, room, "an entry of input", "input")
        return job

    async def prepare_prompt(
        self, server: ServerState, body: EmbedPromptBody, context: RequestContext
    ) -> Job:
        """Return the job of one text. Raises RequestError."""
        model = await check_name(server, body.model)
        if not body.prompt:
            return LoadJob(context=context, requests=(), answer={"embedding": []})
        fields = {
            "model": model,
            "input": body.prompt,
            "truncate_prompt_tokens": _room(server, body),
        }
        with in_callers_words(PROMPT):
            return await self._job(
                server,
                fields,
                context,
                lambda answer, _: {"embedding": answer["data"][0]["embedding"]},
            )

    async def _job(
        self,
        server: ServerState,
        fields: Mapping[str, Any],
        context: RequestContext,
        convert: Callable[[Any, int], dict[str, Any]],
    ) -> EmbedJob:
        body = self._embeddings.parse(fields)
        inner = await self._embeddings.prepare(server, body, context)
        return EmbedJob(
            context=context,
            requests=inner.requests,
            inner=inner,
            convert=convert,
            ready_ns=time.monotonic_ns(),
        )


def _room(server: ServerState, body: EmbedBody | EmbedPromptBody) -> int:
    """Return the most tokens of a text."""
    limit = server.plan.max_sequence_tokens
    return min((body.options.num_ctx if body.options else None) or limit, limit)
