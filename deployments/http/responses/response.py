"""/v1/responses: from a body to a job, and from outputs to OpenAI's response objects and events."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.auth import viewer
from remora.deployments.http.core.errors import error_body, unsupported
from remora.deployments.http.core.field_names import in_callers_words
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.chat import ChatJob, prepare_chat
from remora.deployments.http.generation.reply import Replies, ReplyPiece
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.responses.archive import Archive, ItemIds, Record, new_response_id
from remora.deployments.http.responses.bodies import ResponsesBody
from remora.deployments.http.responses.events import OutputWriter
from remora.deployments.http.responses.input import earlier_items, with_references
from remora.deployments.http.responses.to_chat import RENAMES, as_written, chat_body
from remora.engine.types import Request

_LENGTH, _ABORT = "length", "abort"
MAX_LISTED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseJob:
    """One validated request. Its name is the id of the response, whatever the caller's was.

    ids:  of items of the response, and of those of its input that have none
    """

    body: ResponsesBody
    chat: ChatJob
    archive: Archive
    ids: ItemIds

    @property
    def rid(self) -> str:
        """Id of the response."""
        return self.chat.rid

    @property
    def streams(self) -> bool:
        """Whether the client wants events."""
        return bool(self.body.stream)

    @property
    def requests(self) -> tuple[Request, ...]:
        """What the engine gets."""
        return self.chat.requests

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole answer."""
        replies, writer = self.chat.replies(), OutputWriter(self.ids)
        self.archive.begin(self._response("in_progress"))
        try:
            async for _, output in outputs:
                self._take(writer, replies.add(output))
            writer.finish(_item_status(replies))
            return await self._finished(replies, writer)
        finally:
            self.archive.end(self.rid)

    async def chunks(self, outputs: OutputStream) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer event by event."""
        numbers = itertools.count()
        async with aclosing(self._events(outputs)) as events:
            async for event in events:
                yield event | {"sequence_number": next(numbers)}

    async def _events(self, outputs: OutputStream) -> AsyncGenerator[dict[str, Any], None]:
        replies, writer = self.chat.replies(), OutputWriter(self.ids)
        begun = self._response("in_progress")
        self.archive.begin(begun)
        try:
            yield {"type": "response.created", "response": begun}
            yield {"type": "response.in_progress", "response": begun}
            async for _, output in outputs:
                for event in self._take(writer, replies.add(output)):
                    yield event
            for event in writer.finish(_item_status(replies)):
                yield event
            response = await self._finished(replies, writer)
            kind = "completed" if response["status"] == "completed" else "incomplete"
            yield {"type": f"response.{kind}", "response": response}
        except Exception as error:
            yield {"type": "response.failed", "response": self._failed(error, writer)}
            raise
        finally:
            self.archive.end(self.rid)

    def _take(self, writer: OutputWriter, piece: ReplyPiece) -> list[dict[str, Any]]:
        lines = piece.output.logprobs if self.body.wants_logprobs else None
        return writer.take(piece.events, self.chat.logprobs.chat(lines)["content"] if lines else ())

    async def _finished(self, replies: Replies, writer: OutputWriter) -> dict[str, Any]:
        """Return the response as it is at its end, and keep it if it is to be kept."""
        reason = replies.all[0].finish_reason
        status = {_LENGTH: "incomplete", _ABORT: "cancelled"}.get(reason or "", "completed")
        response = self._response(status) | {
            "output": writer.items,
            "usage": _usage(replies.usage(len(self.chat.prompt_ids))),
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "completed":
            response["completed_at"] = int(time.time())
        if response["store"]:
            items = [as_written(item, self.ids) for item in self.body.input]
            await self.archive.keep(Record(response, items))
        return response

    def _failed(self, error: Exception, writer: OutputWriter) -> dict[str, Any]:
        message = error_body(error)["error"]["message"]
        failure = {"code": "server_error", "message": message}
        return self._response("failed") | {"output": writer.items, "error": failure}

    def _response(self, status: str) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.rid,
            "object": "response",
            "created_at": self.chat.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.chat.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": _reasoning(body),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False and self.archive.keeps,
            "temperature": self.chat.sampling.temperature,
            "text": _text(body),
            "tool_choice": body.tool_choice or "auto",
            "tools": _tools(body),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.chat.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }


def _item_status(replies: Replies) -> str:
    return "incomplete" if replies.all[0].finish_reason in (_LENGTH, _ABORT) else "completed"


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _reasoning(body: ResponsesBody) -> dict[str, Any]:
    given = body.reasoning
    return {"effort": given and given.effort, "summary": given and given.summary}


def _text(body: ResponsesBody) -> dict[str, Any]:
    given = body.text and body.text.format
    if not given:
        return {"format": {"type": "text"}}
    return {"format": given.model_dump(by_alias=True, exclude_none=True)}


def _tools(body: ResponsesBody) -> list[dict[str, Any]]:
    names = ("type", "name", "description", "parameters", "strict")
    return [{name: getattr(tool, name) for name in names} for tool in body.tools or ()]


async def prepare_response(server: ServerState, body: ResponsesBody, rid: str) -> ResponseJob:
    """Check everything that can be checked before the engine is asked.

    Raises InvalidRequest, PromptTooLong, UnknownModel, UnknownResponse.
    """
    archive = server.responses
    earlier = await earlier_items(archive, body)
    body = body.model_copy(update={"input": await with_references(archive, body.input)})
    chat = chat_body(body, earlier)
    with in_callers_words(RENAMES):
        job = await prepare_chat(server, chat, new_response_id())
    return ResponseJob(body=body, chat=job, archive=archive, ids=ItemIds(job.rid))


def responses_routes(server: ServerState) -> APIRouter:
    """Return the routes of responses that exist already."""
    router = APIRouter(tags=["responses"])

    def archive_for(request: HTTPRequest) -> Archive:
        return server.responses.seen_by(request.state.owner, viewer(request))

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: HTTPRequest, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise unsupported("stream", "A response is streamed only while it is made.")
        archive = archive_for(request)
        running = archive.running(response_id)
        return JSONAnswer(running or (await archive.find(response_id)).response)

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: HTTPRequest, response_id: str) -> Response:
        await archive_for(request).forget(response_id)
        return JSONAnswer({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: HTTPRequest, response_id: str) -> Response:
        archive = archive_for(request)
        running = archive.running(response_id)
        if running is not None and await server.calls.abort(response_id):
            return JSONAnswer(running | {"status": "cancelled"})
        status = (await archive.find(response_id)).response["status"]
        raise InvalidRequest(f"The response has ended already; its status is {status}.")

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        request: HTTPRequest,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        items = (await archive_for(request).find(response_id)).items
        return JSONAnswer(_page(items if order == "asc" else items[::-1], limit, after))

    return router


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None:
        if after not in ids:
            raise InvalidRequest("after is not the id of an item.", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
