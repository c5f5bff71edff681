"""A scripted engine, a tokenizer of characters, and the HTTP application over them.

The tokenizer's ids are Unicode code points below 256, plus one end-of-sequence token. The engine
answers every request with the script's text, one token per output, and records what it was asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp

from remora.configs.errors import InvalidRequest, QueueFull
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.deployments.adapters.served_adapters import Adapters, FixedAdapters
from remora.deployments.http.app import build_http_app
from remora.deployments.http.core.auth import Access
from remora.deployments.http.generation.server_state import ServedEngine, ServerState
from remora.deployments.http.generation.weight_update import Weights
from remora.engine.grammar.constraint import Constraint
from remora.engine.grammar.service import GrammarStats
from remora.engine.observe.inspection import Inspection
from remora.engine.types import (
    EngineStats,
    FinishReason,
    Matcher,
    Output,
    Request,
    TokenLogprob,
)
from tests.deployments.http.shared_app import share_http_app
from tests.engine import fakes

EOS = 256
MODEL = "tiny"


class CharTokenizer:
    """One token per character; `<|role|>` marks turns in chats.

    variables:  of the chat template, in addition to the usual ones
    rendered:   what each chat was written from
    """

    takes_text = True
    vocab_size = 257
    eos_token_ids = (EOS,)
    special_ids = frozenset({EOS})
    max_token_chars = 4
    added_tokens: Mapping[int, str] = MappingProxyType({EOS: "</s>"})
    response_template = None
    template_source: str | None = None

    def __init__(self, *variables: str) -> None:
        self.template_variables = frozenset({"messages", "tools", *variables})
        self.rendered: list[dict[str, Any]] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [min(ord(char), 255) for char in text]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def places(self, text: str) -> list[tuple[int, int]]:
        return [(start, start + 1) for start in range(len(text))]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        kept = [id_ for id_ in ids if not (skip_special_tokens and id_ == EOS)]
        return "".join(map(self.token_text, kept))

    def token_text(self, token_id: int) -> str:
        return "</s>" if token_id == EOS else chr(token_id)

    def entry(self, token_id: int) -> str:
        return self.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        if "messages" in template_kwargs:
            raise InvalidRequest("messages is reserved.", "chat_template_kwargs")
        self.rendered.append(
            {"messages": messages, "tools": tools, "documents": documents} | dict(template_kwargs)
        )
        head = "" if tools is None else f"<|tools|>{json.dumps(tools)}"
        text = "".join(f"<|{m['role']}|>{m['content']}" for m in messages)
        return head + text + ("<|assistant|>" if add_generation_prompt else "")


class FakeGrammar:
    """A grammar that allows everything."""

    num_bytes = 1

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint

    def matcher(self) -> Matcher:
        raise NotImplementedError


@dataclass
class FakeGrammars:
    """Compiles anything but sources that hold `refused`, and records what it was asked."""

    asked: list[tuple[Constraint, str]] = field(default_factory=list)

    async def compile(self, constraint: Constraint, *, param: str) -> FakeGrammar:
        self.asked.append((constraint, param))
        if "refused" in constraint.source:
            raise InvalidRequest("It cannot be compiled.", param)
        return FakeGrammar(constraint)

    def stats(self) -> GrammarStats:
        return GrammarStats(
            num_cached=len(self.asked),
            cached_bytes=len(self.asked),
            num_waiting=0,
            hits_total=0,
            misses_total=0,
            failures_total=0,
        )


@dataclass
class FakeEngine:
    """An EngineClient that plays a script.

    text:       what every sequence says, one character per output
    fail_at:    raise `error` before the output of this number (0: before the first)
    gate:       outputs after the first wait until it is set
    is_full:    nothing comes of any request: all wait for their turn
    stopped_by: stop reason of sequences that end by `stop`
    cached_pages: hashes of the pages in its prefix cache
    """

    text: str = "Paris."
    error: Exception | None = None
    fail_at: int = 0
    limit: int | None = None
    stopped_by: str | int | None = None
    cached_pages: bytes = b""
    gate: asyncio.Event | None = None
    is_full: bool = False
    health_error: Exception | None = None
    requests: list[Request] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    plan: EnginePlan | None = None
    running: set[str] = field(default_factory=set)
    is_paused: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        if self.limit is not None and len(self.running) >= self.limit:
            raise QueueFull("Too many sequences are waiting.", 2.5)
        self.requests.append(request)
        self.running.add(request.request_id)
        is_finished = False
        try:
            if self.is_full:
                await asyncio.Event().wait()
            for number, output in enumerate(self._outputs(request)):
                if self.error is not None and number == self.fail_at:
                    raise self.error
                if number and self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                if request.request_id in self.aborted:
                    yield self._ended(request, number)
                    is_finished = True
                    return
                if output.finish_reason is not None and request.sampling.hidden_states:
                    num = len(request.prompt_ids) + output.num_output_tokens - 1
                    states = np.arange(2 * num, dtype=np.float32).reshape(num, 2)
                    output = replace(output, hidden_states=states)
                yield output
            is_finished = True
        finally:
            self.running.discard(request.request_id)
            if not is_finished:
                self.closed.append(request.request_id)
                self.gone.set()

    def _ended(self, request: Request, number: int) -> Output:
        return Output(
            index=0,
            token_ids=(),
            text="",
            finish_reason=FinishReason.ABORT,
            num_output_tokens=number,
        )

    def _outputs(self, request: Request) -> list[Output]:
        sampling = request.sampling
        room = len(self.text) if sampling.max_tokens is None else sampling.max_tokens
        chars = self.text[:room]
        reason = FinishReason.STOP if room >= len(self.text) else FinishReason.LENGTH
        return [
            Output(
                index=index,
                token_ids=(ord(char),),
                text=char,
                logprobs=self._lines(sampling.logprobs, ord(char)),
                prompt_logprobs=self._prompt_lines(request) if (place, index) == (0, 0) else None,
                finish_reason=reason if place == len(chars) - 1 else None,
                stop_reason=self.stopped_by if place == len(chars) - 1 else None,
                num_output_tokens=place + 1,
                num_cached_tokens=2,
            )
            for place, char in enumerate(chars)
            for index in range(sampling.n)
        ]

    def _lines(self, k: int | None, token_id: int) -> tuple[TokenLogprob, ...] | None:
        if k is None:
            return None
        top = ((token_id, -0.5), (33, -1.5), (34, -math.inf))[:k]
        return (TokenLogprob(token_id, -0.5, 1, top),)

    def _prompt_lines(self, request: Request) -> tuple[TokenLogprob | None, ...] | None:
        k = request.sampling.prompt_logprobs
        if k is None:
            return None
        top = ((33, -0.25), (34, -1.25))[:k]
        return (None, *(TokenLogprob(id_, -2.0, 7, top) for id_ in request.prompt_ids[1:]))

    async def abort(self, request_id: str | None) -> int:
        chosen = {id_ for id_ in self.running if request_id in (None, id_)}
        self.aborted |= chosen
        if self.gate is not None:
            self.gate.set()
        return len(chosen)

    async def is_waiting(self, request_id: str) -> bool:
        return self.is_full and request_id in self.running

    async def flush_cache(self) -> bool:
        return not self.running

    async def pause(self, *, retracting: bool = False) -> None:
        self.is_paused = True

    async def unpause(self) -> None:
        self.is_paused = False

    async def page_hashes(self, limit: int) -> bytes:
        return self.cached_pages[: limit * 8]

    def limit_queue(self, plan: EnginePlan) -> None:
        self.plan = plan

    def stats(self) -> EngineStats:
        return make_stats(num_pages=10, num_held_pages=5)

    def check_health(self) -> None:
        if self.health_error is not None:
            raise self.health_error

    async def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


def make_stats(**values: Any) -> EngineStats:
    """Return statistics that are 0 but for these."""
    numbers: dict[str, Any] = {
        field.name: 0 for field in dataclasses.fields(EngineStats) if field.default != ()
    }
    return EngineStats(**(numbers | values))


def make_plan(**changes: Any) -> EnginePlan:
    own: dict[str, Any] = {
        "model_path": Path("/secret/place/tiny"),
        "served_model_name": MODEL,
        "page_size": 16,
        "num_pages": 64,
        "kv_bytes": 1,
        "weight_bytes": 1,
        "max_model_len": 1000,
        "max_step_tokens": 256,
        "prefill_chunk_tokens": 64,
        "max_queued_requests": 4,
    }
    return fakes.make_plan(**(own | changes))


@dataclass
class FakeServer(ServedEngine):
    """A served engine of fakes."""

    client: FakeEngine = field(default_factory=FakeEngine)
    tokenizer: Any = field(default_factory=CharTokenizer)
    plan: EnginePlan = field(default_factory=make_plan)
    config: ServeConfig = field(
        default_factory=lambda: ServeConfig.model_validate({"model": {"path": "/secret/place"}})
    )
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    grammars: FakeGrammars = field(default_factory=FakeGrammars)
    inspection: Inspection = field(default_factory=Inspection)
    weights: Weights | None = None
    pooling: Any = None

    adapters: Adapters = field(init=False)

    def __post_init__(self) -> None:
        self.adapters = FixedAdapters(self.config.lora)


def make_config(**api: Any) -> ServeConfig:
    return make_server_config(api=api)


def make_server_config(**sections: Any) -> ServeConfig:
    return ServeConfig.model_validate({"model": {"path": "tiny"}, **sections})


def make_app(server: FakeServer | None = None) -> FastAPI:
    return build_http_app(
        ServerState.over(server or FakeServer()), access=lambda: Access(is_local=True)
    )


def share_app(server: FakeServer | None = None) -> ASGIApp:
    """Return what answers as `make_app` does, over an application that many servers share."""
    state = ServerState.over(server or FakeServer())
    return share_http_app(state, access=lambda: Access(is_local=True))


def make_client(server: FakeServer | None = None) -> httpx.AsyncClient:
    return client_of(share_app(server))


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    """Return a client of an application."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def methods_of(app: FastAPI) -> dict[str, set[str]]:
    """Return everything that an application answers: path -> methods, parameters as `{name}`."""
    methods: dict[str, set[str]] = {}
    routes: list[Any] = list(app.routes)
    while routes:
        route = routes.pop()
        if isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            methods.setdefault(path, set()).update(route.methods or ())
        else:
            routes += route.original_router.routes
    described = app.openapi()["paths"]
    assert described.keys() <= methods.keys(), "routes that were not found"
    return methods
