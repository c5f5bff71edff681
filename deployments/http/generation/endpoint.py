"""A generating endpoint: how a body is parsed, becomes a job, and runs.

    body -> model (fields.parse) -> job (checked, tokenised) -> outputs (RequestTracker) -> answer

HTTP routes (routes.py) and Python handles use the same endpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal

from remora.configs.errors import InvalidRequest
from remora.configs.sections.pooling import Task
from remora.deployments.http.core.body_limits import apply
from remora.deployments.http.core.fields import Body, BodyT
from remora.deployments.http.core.sse import ChunkWriter
from remora.deployments.http.core.unknown_fields import IgnoredFields
from remora.deployments.http.core.wire_formats import Dialect
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(ABC):
    """One checked request.

    context:   its id, its caller and more
    requests:  one for each prompt
    streams:   whether the response is streamed
    """

    context: RequestContext
    requests: tuple[Request, ...]
    streams: bool = False

    @property
    def rid(self) -> str:
        """The request's id."""
        return self.context.request_id

    @abstractmethod
    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole response."""

    def writer(self) -> ChunkWriter:
        """Return the writer of a streamed response."""
        raise NotImplementedError("this API does not stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedJob(Job):
    """A job of one API whose whole response is that of another API's job, converted.

    convert:  returns the response, given the inner one
    """

    inner: Job
    convert: Callable[[Any], Any]

    @classmethod
    def of(cls, inner: Job, convert: Callable[[Any], Any]) -> ConvertedJob:
        """Return the job around another one, which is not streamed."""
        return cls(context=inner.context, requests=inner.requests, inner=inner, convert=convert)

    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole response."""
        return self.convert(await self.inner.result(outputs))


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[BodyT]):
    """How bodies of one API become jobs.

    dialect:  returns the wire format of the response to a body; None, or if it returns None: the
              format of the path
    kind:     what is generated: a reply to a conversation, the continuation of a prompt, or
              vectors and scores; any = `prepare` refuses what the server does not offer
    """

    parse: Callable[[Any], BodyT]
    prepare: Callable[[ServerState, BodyT, RequestContext], Awaitable[Job]]
    dialect: Callable[[Any], Dialect | None] | None = None
    kind: Literal["chat", "completion", "pooling", "any"] = "chat"

    async def convert(
        self,
        server: ServerState,
        fields: Mapping[str, Any],
        context: RequestContext,
        convert: Callable[[Any], Any],
    ) -> ConvertedJob:
        """Return the job of another API's body, given its fields in terms of this endpoint.

        convert:  as in ConvertedJob
        Raises RequestError.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        inner = await self.prepare(server, self.parse(given), context)
        return ConvertedJob.of(inner, convert)

    async def job(
        self, server: ServerState, body: Any, context: RequestContext
    ) -> tuple[Job, IgnoredFields]:
        """Return the job of a body, and its ignored fields.

        Raises RequestError.
        """
        self._check_open(server)
        apply(server.config.limits)
        parsed = self.parse(body)
        predicts = getattr(parsed, "prediction", None) is not None
        idle = ("prediction",) if predicts and server.plan.speculation is None else ()
        ignored = server.find_ignored(parsed, *idle)
        name = _own_name(parsed)
        if name is not None:
            context = replace(context, request_id=name)
        return await self.prepare(server, parsed, context), ignored

    def _check_open(self, server: ServerState) -> None:
        generation = server.config.api.generation
        if self.kind == "any":
            return
        if (server.pooling is not None) != (self.kind == "pooling"):
            raise InvalidRequest(_other_task(server.plan.task), code="not_offered")
        if self.kind != "pooling" and generation not in ("all", self.kind):
            message = f"This server answers {generation}s only (api.generation)."
            raise InvalidRequest(message, code="not_offered")


def _own_name(body: Body) -> str | None:
    name = getattr(body, "rid", None) or getattr(body, "request_id", None)
    return name if name and isinstance(name, str) else None


def _other_task(task: Task) -> str:
    if task == "generate":
        return (
            "This server's model generates text. Embeddings and scores come from a server whose "
            "model.task is embed, classify, rerank or reward."
        )
    return (
        f"This server's model makes no text: its task is {task} (model.task). Ask /v1/models for "
        "what it is called, and /v1/embeddings, /v1/rerank, /v1/score, /classify, /pooling or "
        "/encode for what it gives."
    )


async def run(server: ServerState, job: Job) -> Any:
    """Run a job to its end and return the whole response."""
    async with aclosing(await server.calls.open(job.context, job.requests)) as outputs:
        return await job.result(outputs)


async def open_outputs(server: ServerState, job: Job, held: AsyncExitStack) -> OutputStream:
    """Start a streamed job; return once there is a first output.

    held:  closes the outputs, even if the task that opens them is cancelled at that moment
    """
    interval = server.config.api.stream_interval_tokens
    outputs = await server.calls.open(job.context, job.requests, interval_tokens=interval)
    held.push_async_callback(outputs.aclose)
    return outputs


async def stream(server: ServerState, job: Job) -> AsyncGenerator[dict[str, Any], None]:
    """Run a job and yield the chunks of its response."""
    async with AsyncExitStack() as held:
        outputs = await open_outputs(server, job, held)
        writer = job.writer()
        held.callback(writer.close)
        for chunk in writer.begin():
            yield chunk
        async for prompt, output in outputs:
            for chunk in writer.chunks(prompt, output):
                yield chunk
        for chunk in await writer.end():
            yield chunk
