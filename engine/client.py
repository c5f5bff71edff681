"""The engine as asyncio code sees it, when it runs in a thread of the same process.

Everything here runs on one event loop; the engine's thread enters it once per step. Text work
(detokenising, stop strings) is done here, off the engine's thread. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from remora.configs.errors import EngineError, InvalidRequest, QueueFull, RequestError, Unavailable
from remora.engine.admission import check_fits
from remora.engine.engine import Engine
from remora.engine.loop import EngineLoop
from remora.engine.outputs import OutputProcessor
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import EngineStats, Output, Request, SequenceOutput


@dataclass(eq=False, slots=True)
class _Stream:
    """What has arrived for one request and was not read yet."""

    request: Request
    events: list[SequenceOutput] = field(default_factory=list)
    error: Exception | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self) -> list[SequenceOutput]:
        """Wait for something, and take all that has gathered."""
        await self.arrived.wait()
        if self.error is not None:
            raise self.error
        events, self.events = self.events, []
        self.arrived.clear()
        return events


class LocalEngineClient:
    """EngineClient over an EngineLoop in this process. Make it on the event loop that uses it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        *,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = engine.plan
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}
        self._num_open = 0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._asyncio = asyncio.get_running_loop()
        self._loop = EngineLoop(
            engine,
            deliver=lambda outputs: self._cross(self._on_outputs, outputs),
            fail=lambda error: self._cross(self._on_failure, error),
            step_timeout_s=engine.plan.step_timeout_s,
            on_start=on_start,
        )
        self._loop.start()

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Submit on first iteration; see EngineClient.generate."""
        stream = self._open(request)
        processor = OutputProcessor(request, self._tokenizer)
        try:
            while not processor.is_finished:
                outputs = processor.process(await stream.next())
                for index in processor.take_stopped():  # before yielding: we may be closed there
                    self._abort_index(request.request_id, index)
                for output in outputs:
                    yield output
        finally:
            self._shut(request, aborted=not processor.is_finished)

    async def abort(self, request_id: str | None) -> int:
        """Abort one request (None: all); returns how many were open."""
        chosen = [rid for rid in self._streams if request_id is None or rid == request_id]
        for rid in chosen:
            self._loop.submit(lambda engine, rid=rid: self._emit(engine.abort(rid)))  # type: ignore[misc]
        return len(chosen)

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; False while requests are running."""
        self.check_health()
        flushed: list[bool] = []
        done = asyncio.Event()
        self._loop.submit(
            lambda engine: flushed.append(engine.flush_cache()),
            then=lambda: self._cross(done.set),
        )
        await done.wait()
        return flushed[0]

    def stats(self) -> EngineStats:
        """Return the newest counters; never blocks."""
        return self._loop.stats()

    def check_health(self) -> None:
        """Raise EngineError if the loop has failed or a step is overdue."""
        if self._loop.failure is not None:
            raise self._loop.failure

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones; False when time ran out first."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop the loop. Requests still open end with EngineError."""
        self._loop.close()

    # -- streams -----------------------------------------------------------------------------

    def _open(self, request: Request) -> _Stream:
        self.check_health()
        if self._is_draining:
            raise Unavailable("The server is shutting down and takes no new requests.")
        check_fits(request, self._plan)
        if request.request_id in self._streams:
            raise InvalidRequest(f"Request id {request.request_id!r} is in use already.", "rid")
        limit = self._plan.max_running_requests + self._plan.max_queued_requests
        if self._num_open + request.sampling.n > limit:
            raise QueueFull(
                f"{self._num_open} sequences are running or queued; the limit is {limit}.",
                retry_after_s=self._retry_after_s(),
            )
        stream = _Stream(request)
        self._streams[request.request_id] = stream
        self._is_idle.clear()
        self._num_open += request.sampling.n
        self._loop.submit(lambda engine: self._add(engine, request))
        return stream

    def _shut(self, request: Request, *, aborted: bool) -> None:
        self._streams.pop(request.request_id, None)
        self._num_open -= request.sampling.n
        if not self._streams:
            self._is_idle.set()
        if aborted:
            self._loop.submit(lambda engine: engine.abort(request.request_id))  # nobody reads on

    def _retry_after_s(self) -> float:
        """Guess when a place is free: one queue's length of typical steps, within reason."""
        step_s = self._loop.stats().last_step_s
        return float(min(30, max(1, round(step_s * 100))))

    def _abort_index(self, request_id: str, index: int) -> None:
        self._loop.submit(lambda engine: engine.abort(request_id, index))

    # -- crossing over -----------------------------------------------------------------------

    def _add(self, engine: Engine, request: Request) -> None:
        """Runs on the engine's thread: a refusal there belongs to this request alone."""
        try:
            engine.add(request)
        except RequestError as error:
            self._cross(self._on_refusal, request.request_id, error)

    def _emit(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            self._cross(self._on_outputs, outputs)

    def _cross(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the event loop; nothing to do once that has been closed."""
        if not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(callback, *args)

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.error is not None:
                stream.error = EngineError(f"The request failed: {output.error}.")
            stream.events.append(output)
            stream.arrived.set()

    def _on_refusal(self, request_id: str, error: Exception) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.error = error
            stream.arrived.set()

    def _on_failure(self, error: EngineError) -> None:
        for request_id in list(self._streams):
            self._on_refusal(request_id, error)
