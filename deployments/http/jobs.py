"""What the endpoints that generate text have in common, over HTTP and over Python handles.

body -> model (fields.parse) -> job (checked, tokenised) -> call (calls.Calls) -> answer
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol

from remora.configs.errors import InvalidRequest
from remora.deployments.http.anthropic import prepare_message
from remora.deployments.http.anthropic_bodies import MessagesBody
from remora.deployments.http.calls import OpenCall
from remora.deployments.http.chat import prepare_chat
from remora.deployments.http.completions import prepare_completion
from remora.deployments.http.dialects import Dialect
from remora.deployments.http.fields import Body, BodyT, check_ignored, ignored_fields, parse
from remora.deployments.http.intervals import in_intervals
from remora.deployments.http.limits import apply
from remora.deployments.http.native import prepare_generate
from remora.deployments.http.native_bodies import parse_generate
from remora.deployments.http.openai_bodies import ChatBody, CompletionBody
from remora.deployments.http.responses import prepare_response
from remora.deployments.http.responses_bodies import ResponsesBody
from remora.deployments.http.scoring import ScoreBody, prepare_score
from remora.deployments.http.served import Served
from remora.engine.types import Request


class Job(Protocol):
    """A validated request: what the engine gets, and what its outputs become."""

    @property
    def rid(self) -> str:
        """The caller's name of the request, or one drawn for it."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the client wants chunks."""
        ...

    @property
    def requests(self) -> tuple[Request, ...]:
        """One request for each prompt."""
        ...

    async def result(self, outputs: OpenCall) -> Any:
        """Return the whole answer."""
        ...

    def chunks(self, outputs: OpenCall) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer piece by piece."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[BodyT]):
    """A way to ask for text: how a body is read, and how it becomes a job.

    dialect:  in which a body is answered; None = in that of its path
    kind:     what is asked: how a conversation goes on, or a bare prompt
    """

    parse: Callable[[Any], BodyT]
    prepare: Callable[[Served, BodyT, str], Awaitable[Job]]
    dialect: Callable[[Any], Dialect] | None = None
    kind: Literal["chat", "completion"] = "chat"

    async def job(self, served: Served, body: Any, rid: str) -> tuple[Job, Mapping[str, str]]:
        """Return the job of a body, and headers that report fields left out of it.

        Raises RequestError.
        """
        self._check_open(served.config.api.generation)
        apply(served.config.limits)
        parsed = self.parse(body)
        headers = check_ignored(ignored_fields(parsed), reject=served.rejects_unknown_fields)
        return await self.prepare(served, parsed, _own_name(parsed) or rid), headers

    def _check_open(self, generation: str) -> None:
        if generation not in ("all", self.kind):
            message = f"This server answers {generation}s only (api.generation)."
            raise InvalidRequest(message, code="not_offered")


def _own_name(body: Body) -> str | None:
    name = getattr(body, "rid", None) or getattr(body, "request_id", None)
    return name if isinstance(name, str) else None


CHAT = Endpoint(partial(parse, ChatBody), prepare_chat)
COMPLETIONS = Endpoint(partial(parse, CompletionBody), prepare_completion, kind="completion")
GENERATE = Endpoint(parse_generate, prepare_generate, kind="completion")
RESPONSES = Endpoint(partial(parse, ResponsesBody), prepare_response)
MESSAGES = Endpoint(partial(parse, MessagesBody), prepare_message)
SCORE = Endpoint(partial(parse, ScoreBody), prepare_score, kind="completion")


async def run(served: Served, job: Job) -> Any:
    """Run a job to its end and return the whole answer."""
    async with aclosing(await served.calls.open(job.rid, job.requests)) as outputs:
        return await job.result(outputs)


async def open_stream(served: Served, job: Job) -> OpenCall:
    """Begin to run a job whose answer is told piece by piece."""
    interval = served.config.api.stream_interval_tokens
    return in_intervals(await served.calls.open(job.rid, job.requests), interval)


async def stream(served: Served, job: Job) -> AsyncGenerator[dict[str, Any], None]:
    """Run a job and yield its chunks as they come."""
    async with (
        aclosing(await open_stream(served, job)) as outputs,
        aclosing(job.chunks(outputs)) as chunks,
    ):
        async for chunk in chunks:
            yield chunk
