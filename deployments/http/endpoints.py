"""What the endpoints that generate text have in common, over HTTP and over Python handles.

body -> model (fields.parse) -> job (checked, tokenised) -> call (calls.Calls) -> answer
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol

from remora.configs.errors import InvalidRequest
from remora.configs.sections.pooling import Task
from remora.deployments.http.anthropic.bodies import MessagesBody
from remora.deployments.http.anthropic.messages import prepare_message
from remora.deployments.http.core.body_limits import apply
from remora.deployments.http.core.fields import Body, BodyT, check_ignored, ignored_fields, parse
from remora.deployments.http.core.wire_formats import Dialect
from remora.deployments.http.generation.bodies import ChatBody, CompletionBody
from remora.deployments.http.generation.chat import prepare_chat
from remora.deployments.http.generation.completions import prepare_completion
from remora.deployments.http.generation.intervals import in_intervals
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.pooling.classify import (
    EncodeBody,
    PoolingBody,
    parse_classify,
    prepare_classify,
    prepare_encode,
    prepare_pooling,
)
from remora.deployments.http.pooling.embeddings import EmbeddingsBody, prepare_embeddings
from remora.deployments.http.pooling.rerank import (
    PairScoreBody,
    RerankBody,
    prepare_pair_score,
    prepare_rerank,
)
from remora.deployments.http.responses.bodies import ResponsesBody
from remora.deployments.http.responses.response import prepare_response
from remora.deployments.http.sglang.bodies import parse_generate
from remora.deployments.http.sglang.generate import prepare_generate
from remora.deployments.http.sglang.score import ScoreBody, prepare_score
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

    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole answer."""
        ...

    def chunks(self, outputs: OutputStream) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer piece by piece."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[BodyT]):
    """A way to ask for text: how a body is read, and how it becomes a job.

    dialect:  in which a body is answered; None = in that of its path
    kind:     what is asked: how a conversation goes on, or a bare prompt, or no text; any = the
              endpoint finds out and refuses what is not open
    """

    parse: Callable[[Any], BodyT]
    prepare: Callable[[ServerState, BodyT, str], Awaitable[Job]]
    dialect: Callable[[Any], Dialect] | None = None
    kind: Literal["chat", "completion", "pooling", "any"] = "chat"

    async def job(self, server: ServerState, body: Any, rid: str) -> tuple[Job, Mapping[str, str]]:
        """Return the job of a body, and headers that report fields left out of it.

        Raises RequestError.
        """
        self._check_open(server)
        apply(server.config.limits)
        parsed = self.parse(body)
        headers = check_ignored(ignored_fields(parsed), reject=server.rejects_unknown_fields)
        return await self.prepare(server, parsed, _own_name(parsed) or rid), headers

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
    return name if isinstance(name, str) else None


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


def parse_score(body: Any) -> ScoreBody | PairScoreBody:
    """Read a body of /v1/score: pairs of texts, or a query, items and labels."""
    is_pairs = isinstance(body, dict) and not body.keys().isdisjoint(
        ("text_1", "text_2", "queries", "documents")
    )
    return parse(PairScoreBody, body) if is_pairs else parse(ScoreBody, body)


async def prepare_any_score(server: ServerState, body: ScoreBody | PairScoreBody, rid: str) -> Job:
    """Ask the kind of model that the body is for. Raises RequestError."""
    if isinstance(body, PairScoreBody):
        return await prepare_pair_score(server, body, rid)
    if server.pooling is not None:
        raise InvalidRequest(
            "This server's model scores pairs of texts: send text_1 and text_2.", code="not_offered"
        )
    if server.config.api.generation == "chat":
        raise InvalidRequest("This server answers chats only (api.generation).", code="not_offered")
    return await prepare_score(server, body, rid)


CHAT = Endpoint(partial(parse, ChatBody), prepare_chat)
COMPLETIONS = Endpoint(partial(parse, CompletionBody), prepare_completion, kind="completion")
GENERATE = Endpoint(parse_generate, prepare_generate, kind="completion")
RESPONSES = Endpoint(partial(parse, ResponsesBody), prepare_response)
MESSAGES = Endpoint(partial(parse, MessagesBody), prepare_message)
SCORE = Endpoint(parse_score, prepare_any_score, kind="any")
EMBEDDINGS = Endpoint(partial(parse, EmbeddingsBody), prepare_embeddings, kind="pooling")
RERANK = Endpoint(partial(parse, RerankBody), prepare_rerank, kind="pooling")
CLASSIFY = Endpoint(parse_classify, prepare_classify, kind="pooling")
POOLING = Endpoint(partial(parse, PoolingBody), prepare_pooling, kind="pooling")
ENCODE = Endpoint(partial(parse, EncodeBody), prepare_encode, kind="pooling")


async def run(server: ServerState, job: Job) -> Any:
    """Run a job to its end and return the whole answer."""
    async with aclosing(await server.calls.open(job.rid, job.requests)) as outputs:
        return await job.result(outputs)


@asynccontextmanager
async def open_stream(server: ServerState, job: Job) -> AsyncIterator[OutputStream]:
    """Run a job whose answer is told piece by piece, for as long as the block lasts."""
    interval = server.config.api.stream_interval_tokens
    call = await server.calls.open(job.rid, job.requests)
    async with aclosing(in_intervals(call, interval)) as outputs:
        yield outputs


async def stream(server: ServerState, job: Job) -> AsyncGenerator[dict[str, Any], None]:
    """Run a job and yield its chunks as they come."""
    async with (
        open_stream(server, job) as outputs,
        aclosing(job.chunks(outputs)) as chunks,
    ):
        async for chunk in chunks:
            yield chunk
