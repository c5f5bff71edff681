"""SGLang's /parse_function_call and /separate_reasoning: the parsers alone, without a model.

They parse a text exactly as if the model had generated it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import AtMost
from remora.deployments.http.core.fields import Body, parse
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.encoding import OFF_LOOP_CHARS
from remora.deployments.http.generation.replies import Replies, Reply
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.generation.tools import ToolBody
from remora.deployments.parsers.format_choice import reasoning_parser_names
from remora.deployments.parsers.reasoning import reasoning_format
from remora.deployments.parsers.replies import ReplyFormats
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS
from remora.deployments.parsers.tools import NO_TOOLS, ToolChoice, ToolUse
from remora.engine.types import FinishReason, Output

MAX_PARSED_CHARS = 2**20

Text = Annotated[str, Field(max_length=MAX_PARSED_CHARS)]
ParserName = Annotated[str, Field(min_length=1, max_length=64)]


class ParseCallsBody(Body):
    """Body of /parse_function_call."""

    text: Text
    tools: Annotated[list[ToolBody], Field(min_length=1), AtMost("max_tools")]
    tool_call_parser: ParserName | None = None


class SeparateBody(Body):
    """Body of /separate_reasoning."""

    text: Text
    reasoning_parser: ParserName | None = None


PARSE_BODIES: Mapping[str, type[Body]] = {
    "/parse_function_call": ParseCallsBody,
    "/separate_reasoning": SeparateBody,
}


def parse_routes(server: ServerState) -> APIRouter:
    """Return the router of both paths."""
    router = APIRouter(tags=["parsers"])

    @router.post("/parse_function_call")
    async def parse_function_call(request: Request) -> Response:
        body = parse(ParseCallsBody, await read_body(server, request))
        reply = await _read(
            _call_formats(server, body.tool_call_parser),
            ToolUse(tools=tuple(t.offered.as_tool() for t in body.tools), choice=ToolChoice.AUTO),
            body.text,
        )
        calls = [
            {"tool_index": number, "name": call.name, "parameters": call.arguments}
            for number, call in enumerate(reply.calls)
        ]
        return _answer(server, body, {"normal_text": reply.text, "calls": calls})

    @router.post("/separate_reasoning")
    async def separate_reasoning(request: Request) -> Response:
        body = parse(SeparateBody, await read_body(server, request))
        formats = _reasoning_formats(server, body.reasoning_parser)
        reply = await _read(formats, NO_TOOLS, body.text)
        texts = {"reasoning_text": "".join(reply.reasoning), "text": reply.text}
        return _answer(server, body, texts)

    return router


def _answer(server: ServerState, body: Body, answer: dict[str, Any]) -> Response:
    headers = server.report_ignored(body)
    return JSONAnswer(answer, headers=headers)


def _call_formats(server: ServerState, name: str | None) -> ReplyFormats:
    """Return formats that parse only tool calls. Raises InvalidRequest."""
    formats = replace(server.formats, reasoning_format=None)
    if name is not None:
        form = TOOL_FORMATS.get(name)
        formats = replace(formats, tool_format=form, checkpoint_format=None)
    if formats.tool_format_name is None:
        raise _unknown("tool_call_parser", name, tuple(TOOL_FORMATS))
    return formats


def _reasoning_formats(server: ServerState, name: str | None) -> ReplyFormats:
    """Return formats that parse only reasoning. Raises InvalidRequest."""
    formats = replace(server.formats, tool_format=None)
    if name is not None:
        form = reasoning_format(name)
        formats = replace(formats, reasoning_format=form, checkpoint_format=None)
    if formats.reasoning_format_name is None:
        raise _unknown("reasoning_parser", name, reasoning_parser_names())
    return formats


def _unknown(param: str, name: str | None, names: tuple[str, ...]) -> InvalidRequest:
    what = "is required: this model has none of its own" if name is None else "is not known"
    return InvalidRequest(f"{param} {what}; send one of {', '.join(names)}.", param)


async def _read(formats: ReplyFormats, use: ToolUse, text: str) -> Reply:
    def work() -> Reply:
        replies = Replies(1, 1, formats.make_parser(prompt="", use=use))
        whole = Output(index=0, token_ids=(), text=text, finish_reason=FinishReason.STOP)
        return replies.add(0, whole)

    return await asyncio.to_thread(work) if len(text) > OFF_LOOP_CHARS else work()
