"""/v1/responses: turns a body into a job, and outputs into response objects and events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import error_body
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.generation.chat import PreparedChat
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
from remora.deployments.http.responses.to_chat import as_written
from remora.deployments.http.responses.tools import custom_names
from remora.deployments.http.responses.truncation import prepare_within
from remora.deployments.observing.reply_clock import ReplyClock
from remora.engine.types import Output

_LENGTH, _ABORT = "length", "abort"
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseJob(Job):
    """A validated request. `context` has the id of the response, not the caller's request id.

    ids:            ids for the response's items, and for input items without an id
    shows_metrics:  whether a complete response has `metrics`, the times of the request
    """

    body: ResponsesBody
    chat: PreparedChat
    archive: Archive
    ids: ItemIds
    shows_metrics: bool = False

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
            "background": bool(body.background),
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
            "tools": [tool.show() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.chat.sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }


class ResponseWriter(ChunkWriter):
    """Writes a response as numbered events and stores the complete response."""

    def __init__(self, job: ResponseJob) -> None:
        self._job = job
        self._replies = job.chat.replies()
        self._items = OutputWriter(
            job.ids,
            custom=custom_names(job.body.tools),
            shows_reasoning=job.body.include_reasoning is not False,
        )
        self._numbers = itertools.count()
        self._clock = ReplyClock(job.context.started_ns)

    def begin(self) -> Sequence[Chunk]:
        """Return the first events."""
        begun = self._job.response("in_progress")
        self._job.archive.begin(begun)
        return self._states(begun, "created", "in_progress")

    def queued(self) -> Sequence[Chunk]:
        """Return the first events of a response that may have to wait."""
        return self._states(self._job.response("queued"), "created", "queued")

    def started(self) -> Sequence[Chunk]:
        """Return the event of a queued response that no longer waits."""
        return self._states(self._job.response("in_progress"), "in_progress")

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the events of one output."""
        return self._numbered(self.take(prompt, output))

    def take(self, prompt: int, output: Output) -> list[dict[str, Any]]:
        """Add one output and return its events, without numbers."""
        self._clock.note(output)
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
        events, response = self.last()
        await self._store(response)
        return events

    def last(self, status: str | None = None) -> tuple[list[Chunk], dict[str, Any]]:
        """Return the last events and the complete response; `status` replaces its own."""
        events, response = self._complete(status)
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return self._numbered(events) + self._states(response, kind), response

    def fail(self, error: Exception) -> Sequence[Chunk]:
        """Return the event of a failed response."""
        return self.failed(error)[0]

    def failed(self, error: Exception) -> tuple[list[Chunk], dict[str, Any]]:
        """Return the event of a failed response, and the response."""
        message = error_body(error)["error"]["message"]
        failure = {"code": "server_error", "message": message}
        response = self.response_so_far("failed") | {"error": failure}
        return self._states(response, "failed"), response

    def response_so_far(self, status: str) -> dict[str, Any]:
        """Return the response with the items that are finished."""
        return self._job.response(status) | {"output": list(self._items.items)}

    def close(self) -> None:
        """Record that the response is no longer in progress."""
        self._job.archive.end(self._job.rid)

    async def finish(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the last item events and the complete response; store it if requested."""
        events, response = self._complete(None)
        await self._store(response)
        return events, response

    def _complete(self, status: str | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        job, reason = self._job, self._replies.all[0].reason
        is_cut_off = status is not None or reason in (_LENGTH, _ABORT)
        if status is None:
            status = {_LENGTH: "incomplete", _ABORT: CANCELLED}.get(reason or "", "completed")
        has_begun = status != CANCELLED or self._replies.all[0].has_begun
        events = (
            self._items.finish("incomplete" if is_cut_off else "completed") if has_begun else []
        )
        response = job.response(status) | {
            "output": self._items.items,
            "usage": usage_of(self._replies.usage([len(job.chat.prompt_ids)])),
        }
        if job.shows_metrics:
            response["metrics"] = self._replies.metrics(self._clock)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "completed":
            response["completed_at"] = int(time.time())
        return events, response

    async def _store(self, response: dict[str, Any]) -> None:
        job = self._job
        if response["store"]:
            items = [as_written(item, job.ids) for item in job.body.input]
            await job.archive.keep(Record(response, items))

    def _item_status(self) -> str:
        is_cut_off = self._replies.all[0].reason in (_LENGTH, _ABORT)
        return "incomplete" if is_cut_off else "completed"

    def _states(self, response: dict[str, Any], *kinds: str) -> list[Chunk]:
        """Return events that hold the response."""
        return self._numbered({"type": f"response.{kind}", "response": response} for kind in kinds)

    def _numbered(self, events: Iterable[dict[str, Any]]) -> list[Chunk]:
        return [event | {"sequence_number": next(self._numbers)} for event in events]


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a usage object with the names of /v1/responses."""
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
    given, more = body.text and body.text.format, dict[str, Any]()
    if body.text and body.text.verbosity:
        more["verbosity"] = body.text.verbosity
    if not given:
        return {"format": {"type": "text"}} | more
    return {"format": given.model_dump(by_alias=True, exclude_none=True)} | more


async def prepare_response(
    server: ServerState, body: ResponsesBody, context: RequestContext
) -> ResponseJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel, UnknownResponse, Unavailable.
    """
    archive = archive_of(server, context)
    if body.background:
        archive.check_keeps("background")
        if body.store is False:
            raise InvalidRequest("background needs store to be true.", "background")
        context = replace(context, answer=None)
    earlier = await earlier_items(archive, body)
    body = body.model_copy(update={"input": await with_references(archive, body.input)})
    context = replace(context, request_id=new_response_id())
    prepared = await prepare_within(server, body, earlier, context)
    return ResponseJob(
        context=context,
        requests=(prepared.request,),
        streams=bool(body.stream),
        body=body,
        chat=prepared,
        archive=archive,
        ids=ItemIds(context.request_id),
        shows_metrics=server.config.api.request_metrics,
    )
