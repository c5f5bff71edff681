"""/v1/responses: turns a body into a job, and outputs into response objects and events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import error_body, unsupported
from remora.deployments.http.core.field_names import in_callers_words
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.chat import PreparedChat, prepare_chat
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.responses.archive import (
    Archive,
    ItemIds,
    Record,
    archive_of,
    new_response_id,
)
from remora.deployments.http.responses.bodies import ResponsesBody
from remora.deployments.http.responses.events import OutputWriter
from remora.deployments.http.responses.input import earlier_items, with_references
from remora.deployments.http.responses.to_chat import RENAMES, as_written, chat_body
from remora.engine.types import Output

_LENGTH, _ABORT = "length", "abort"
MAX_LISTED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseJob(Job):
    """A validated request. `context` has the id of the response, not the caller's request id.

    ids:  ids for the response's items, and for input items without an id
    """

    body: ResponsesBody
    chat: PreparedChat
    archive: Archive
    ids: ItemIds

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the complete answer."""
        writer = ResponseWriter(self)
        writer.begin()
        try:
            async for prompt, output in outputs:
                writer.take(prompt, output)
            _, response = await writer.finish()
            return response
        finally:
            writer.close()

    def writer(self) -> ResponseWriter:
        """Return the writer of the streamed answer."""
        return ResponseWriter(self)

    def response(self, status: str) -> dict[str, Any]:
        """Return the response object with empty output."""
        body = self.body
        return {
            "id": self.rid,
            "object": "response",
            "created_at": self.context.created,
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


class ResponseWriter(ChunkWriter):
    """Writes a response as numbered events and stores the complete response."""

    def __init__(self, job: ResponseJob) -> None:
        self._job = job
        self._replies = job.chat.replies()
        self._items = OutputWriter(job.ids)
        self._numbers = itertools.count()

    def begin(self) -> Sequence[Chunk]:
        """Return the first events."""
        begun = self._job.response("in_progress")
        self._job.archive.begin(begun)
        kinds = ("response.created", "response.in_progress")
        return self._numbered({"type": kind, "response": begun} for kind in kinds)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the events of one output."""
        return self._numbered(self.take(prompt, output))

    def take(self, prompt: int, output: Output) -> list[dict[str, Any]]:
        """Add one output and return its events, without numbers."""
        events = self._replies.of(prompt, output).add(output)
        entries = output.logprobs if self._job.body.wants_logprobs else None
        logprobs = self._job.chat.logprobs.chat(entries)["content"] if entries else ()
        chunks = self._items.take(events, logprobs)
        if output.finish_reason is None:
            return chunks
        # Not with the last events: storing the response may take long.
        return chunks + self._items.finish(self._item_status())

    async def end(self) -> Sequence[Chunk]:
        """Return the last events."""
        events, response = await self.finish()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return self._numbered([*events, {"type": f"response.{kind}", "response": response}])

    def fail(self, error: Exception) -> Sequence[Chunk]:
        """Return the event of a failed response."""
        message = error_body(error)["error"]["message"]
        failure = {"code": "server_error", "message": message}
        response = self._job.response("failed") | {"output": self._items.items, "error": failure}
        return self._numbered([{"type": "response.failed", "response": response}])

    def close(self) -> None:
        """Record that the response is no longer in progress."""
        self._job.archive.end(self._job.rid)

    async def finish(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the last item events and the complete response; store it if requested."""
        job, reason = self._job, self._replies.all[0].reason
        status = {_LENGTH: "incomplete", _ABORT: "cancelled"}.get(reason or "", "completed")
        events = self._items.finish(self._item_status())
        response = job.response(status) | {
            "output": self._items.items,
            "usage": _usage(self._replies.usage([len(job.chat.prompt_ids)])),
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "completed":
            response["completed_at"] = int(time.time())
        if response["store"]:
            items = [as_written(item, job.ids) for item in job.body.input]
            await job.archive.keep(Record(response, items))
        return events, response

    def _item_status(self) -> str:
        is_cut_off = self._replies.all[0].reason in (_LENGTH, _ABORT)
        return "incomplete" if is_cut_off else "completed"

    def _numbered(self, events: Iterable[dict[str, Any]]) -> list[Chunk]:
        return [event | {"sequence_number": next(self._numbers)} for event in events]


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


async def prepare_response(
    server: ServerState, body: ResponsesBody, context: RequestContext
) -> ResponseJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel, UnknownResponse, Unavailable.
    """
    archive = archive_of(server, context)
    earlier = await earlier_items(archive, body)
    body = body.model_copy(update={"input": await with_references(archive, body.input)})
    chat = chat_body(body, earlier)
    with in_callers_words(RENAMES):
        context = replace(context, request_id=new_response_id())
        prepared = await prepare_chat(server, chat, context)
    return ResponseJob(
        context=context,
        requests=(prepared.request,),
        streams=bool(body.stream),
        body=body,
        chat=prepared,
        archive=archive,
        ids=ItemIds(context.request_id),
    )


def responses_routes(server: ServerState) -> APIRouter:
    """Return the routes of existing responses."""
    router = APIRouter(tags=["responses"])

    def archive_for(request: HTTPRequest) -> Archive:
        return archive_of(server, RequestContext.of(request, server.metrics.labels))

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
