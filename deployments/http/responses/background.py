"""Responses that are made in the background: polled, followed as streams, and cancelled.

The replica that accepts such a response makes it, whether or not a client is connected. Other
replicas see what it stores: the state of the response every BEAT_S seconds, and all events at the
end. They store the wish to cancel it, which the making replica reads as often.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from remora.configs.errors import CapacityError, QueueFull, RequestTimedOut, Unavailable
from remora.deployments.http.core.errors import log_error, unsupported
from remora.deployments.http.core.sse import Chunk, ChunkWriter, EventStream
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.endpoint import Job, open_outputs
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.routes import answer_job
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.responses.archive import UNFINISHED, Archive, Record
from remora.deployments.http.responses.response import CANCELLED, ResponseJob
from remora.deployments.http.responses.to_chat import as_written

MAX_RUNS = 256
BEAT_S = 2.0
_STOPPED = "The server stopped before the response was complete."


class Replay(ChunkWriter):
    """Writes events that are complete already."""

    def chunks(self, prompt: int, output: Any) -> Sequence[Chunk]:
        """Return the event."""
        return (output,)


class BackgroundRun:
    """One response in progress.

    events:  its events so far, if the client asked for a stream
    """

    def __init__(self, server: ServerState, job: ResponseJob) -> None:
        self.job = job
        self.events: list[Chunk] = []
        self._server = server
        self._writer = job.writer()
        self._items = [as_written(item, job.ids) for item in job.body.input]
        self._status = "queued"
        self._final: dict[str, Any] | None = None
        self._has_begun = self._is_cancelled = False
        self._changed = asyncio.Event()
        self._is_ending = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._add(self._writer.queued())

    @property
    def has_ended(self) -> bool:
        """Whether the final response is stored."""
        return self._final is not None

    @property
    def response(self) -> dict[str, Any]:
        """The response object so far."""
        return self._final or self._writer.response_so_far(self._status)

    async def store(self) -> None:
        """Store the state, which other replicas show."""
        await self.job.archive.keep(Record(self.response, self._items, time.time()))

    async def make(self) -> None:
        """Make the response to its end, whatever the end is."""
        beating = asyncio.create_task(self._beat())
        self._has_begun = True
        try:
            if self._is_cancelled:
                raise asyncio.CancelledError
            async with AsyncExitStack() as held:
                outputs = await self._open(held)
                self._status = "in_progress"
                self._add(self._writer.started())
                async for prompt, output in outputs:
                    self._add(self._writer.chunks(prompt, output))
            events, final = self._writer.last()
        except asyncio.CancelledError:
            if self._is_cancelled:
                events, final = self._writer.last(CANCELLED)
            else:
                events, final = self._writer.failed(Unavailable(_STOPPED))
        except Exception as error:
            # A boundary: no client may be connected, so the response itself reports the error.
            log_error(error, self.job.rid)
            events, final = self._writer.failed(error)
        self._is_ending.set()
        await asyncio.wait({beating})  # a state being stored must not replace the final one
        await self._end(events, final)

    async def cancel(self) -> dict[str, Any]:
        """Cancel the response if it has not ended; return the final response object."""
        self._interrupt()
        while self._final is None:
            await self._changed.wait()
        return self._final

    async def follow(self, after: int) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield the events after the one of this number, as outputs for `Replay`."""
        place = after + 1
        while True:
            changed, has_ended = self._changed, self._final is not None
            for event in self.events[place:]:
                yield 0, event
                place += 1
            if has_ended:
                return
            if place >= len(self.events):
                await changed.wait()

    async def _open(self, held: AsyncExitStack) -> OutputStream:
        """Start the request; wait while the server has no room for it."""
        while True:
            try:
                return await open_outputs(self._server, self.job, held)
            except RequestTimedOut:
                raise
            except CapacityError as error:
                await asyncio.sleep(error.retry_after_s)

    async def _beat(self) -> None:
        """Store the state from time to time, and cancel the response if another replica asks."""
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._is_ending.wait()
                return
            except TimeoutError:
                pass
            await self.store()
            try:
                if await self.job.archive.is_to_be_cancelled(self.job.rid):
                    self._interrupt()
            except Unavailable:
                continue

    def _interrupt(self) -> None:
        self._is_cancelled = True
        # A task that has not begun would end without a word.
        if self.task is not None and self._has_begun and not self._is_ending.is_set():
            self.task.cancel()

    def _add(self, events: Sequence[Chunk]) -> None:
        if self.job.streams:
            self.events += events
            self._notify()

    async def _end(self, events: Sequence[Chunk], final: dict[str, Any]) -> None:
        archive = self.job.archive
        try:
            if self.job.streams:
                await archive.keep_events(self.job.rid, [*self.events, *events])
            await archive.keep(Record(final, self._items))
        finally:  # whatever happens, no caller may wait for ever
            self._final = final
            self._add(events)
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class BackgroundRuns:
    """The responses that this replica makes in the background, by id."""

    def __init__(self) -> None:
        self._runs: dict[str, BackgroundRun] = {}

    async def start(self, server: ServerState, job: ResponseJob) -> BackgroundRun:
        """Start a response. Raises QueueFull."""
        if len(self._runs) >= MAX_RUNS:
            message = f"{MAX_RUNS} responses are made in the background; wait for one of them."
            raise QueueFull(message, 5.0)
        run = self._runs[job.rid] = BackgroundRun(server, job)
        try:
            await run.store()
        except BaseException:
            del self._runs[job.rid]
            raise
        run.task = asyncio.create_task(run.make())
        run.task.add_done_callback(lambda _: self._runs.pop(job.rid, None))
        return run

    def find(self, response_id: str, archive: Archive) -> BackgroundRun | None:
        """Return a response in progress that the caller of the archive sees."""
        run = self._runs.get(response_id)
        if run is None or run.has_ended or not archive.sees(run.job.archive.owner):
            return None
        return run


def runs_of(server: ServerState) -> BackgroundRuns:
    """Return the server's responses in progress."""
    return server.part(BackgroundRuns, lambda _: BackgroundRuns())


async def answer_response(
    server: ServerState, request: Request, job: Job, headers: Mapping[str, str]
) -> Response:
    """Return the response to a job of /v1/responses, which may be made in the background."""
    assert isinstance(job, ResponseJob)
    if not job.body.background:
        return await answer_job(server, request, job, headers)
    run = await runs_of(server).start(server, job)
    if not job.streams:
        return JSONAnswer(run.response, headers=dict(headers))
    return stream_of(request, run.follow(-1), headers)


def stream_of(
    request: Request, events: AsyncGenerator[tuple[int, Any], None], headers: Mapping[str, str]
) -> Response:
    """Return the stream of events that are complete."""
    state = request.state
    return EventStream(
        events, Replay(), state.dialect, request_id=state.request_id, headers=headers
    )


async def resumed(
    server: ServerState, archive: Archive, response_id: str, after: int
) -> AsyncGenerator[tuple[int, Any], None]:
    """Return the events of a response after the one of this number.

    Raises UnknownResponse, InvalidRequest if the response has no stream, and Unavailable.
    """
    run = runs_of(server).find(response_id, archive)
    if run is not None and run.job.streams:
        return run.follow(after)
    if run is None:
        response = (await archive.find(response_id)).response
        if response["status"] in UNFINISHED:
            raise Unavailable("Another replica makes this response; try again, or poll it.")
        events = await archive.events(response_id)
        if events is not None:
            return _stored(events[after + 1 :])
    raise unsupported(
        "stream",
        "This response has no stream: only one that was created with background and stream both "
        "true can be streamed again. Read it without stream.",
    )


async def _stored(events: Sequence[Chunk]) -> AsyncGenerator[tuple[int, Any], None]:
    for event in events:
        yield 0, event


async def cancel_elsewhere(archive: Archive, record: Record) -> dict[str, Any]:
    """Cancel a response that another replica makes; return the response once it has ended."""
    response_id = record.response["id"]
    if record.response["status"] in UNFINISHED:
        await archive.ask_to_cancel(response_id)
    while record.response["status"] in UNFINISHED:
        await asyncio.sleep(BEAT_S / 4)
        record = await archive.find(response_id)
    return record.response
