"""The asyncio client of an engine that runs in a thread of the same process.

All methods run on one event loop, which the engine's thread calls once per step. Text processing
(detokenisation, stop strings) happens here, off the engine's thread. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from remora.configs.errors import (
    EngineError,
    InvalidRequest,
    NotFinite,
    QueueFull,
    RateLimited,
    RequestError,
    Unavailable,
)
from remora.configs.planning.plan import EnginePlan
from remora.engine.loop import EngineLoop, Stepping
from remora.engine.tenants import Tenant
from remora.engine.thread import EngineThread
from remora.engine.tokens.outputs import OutputProcessor
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import NOT_FINITE, EngineStats, Output, Request, RowFault, SequenceOutput

AnswerT = TypeVar("AnswerT")
Repair = Callable[[EngineError], Awaitable[None]]

logger = logging.getLogger(__name__)

MAX_STEPS_AHEAD = 2
MAX_WAIT_S = 0.1  # longest wait of the engine for a busy event loop


@dataclass(eq=False, slots=True)
class _Stream:
    """Events of one request that have arrived but are not read yet.

    request:    as the engine knows it, under a unique internal id: callers may reuse an id while
                outputs of its former use are still on the way
    name:       the caller's id
    has_begun:  whether any output has arrived
    """

    request: Request
    name: str
    events: list[SequenceOutput] = field(default_factory=list)
    error: Exception | None = None
    has_begun: bool = False
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def engine_id(self) -> str:
        """The engine's id of the request."""
        return self.request.request_id

    async def next(self) -> list[SequenceOutput]:
        """Wait for events and take all of them; an error is raised after the events before it."""
        await self.arrived.wait()
        if self.error is not None and not self.events:
            raise self.error
        events, self.events = self.events, []
        if self.error is None:
            self.arrived.clear()
        return events

    def fail(self, error: Exception) -> None:
        """Make the reader raise `error` after it has read the earlier events."""
        self.error = error
        self.arrived.set()


class LocalEngineClient:
    """EngineClient over an EngineLoop in this process. Create it on the event loop that uses it.

    num_failures:  of the engine, those included after which it was repaired
    """

    def __init__(
        self,
        engine: Stepping,
        tokenizer: Tokenizer | None,
        *,
        on_start: Callable[[], None] = lambda: None,
        thread: EngineThread | None = None,
    ) -> None:
        """Start the engine's loop, in the thread that built the engine if one is given."""
        self._engine = engine  # only methods that any thread may call
        self._plan = engine.plan
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}
        self._questions: set[asyncio.Future[None]] = set()
        self._numbers = itertools.count()
        self._num_open = Counter[str]()  # sequences by tenant, each with a queue of its own
        self._ahead = threading.Semaphore(MAX_STEPS_AHEAD)
        self._is_draining = False
        self._refusal: str | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._asyncio = asyncio.get_running_loop()
        self._failed: asyncio.Future[EngineError] = self._asyncio.create_future()
        self._repair: Repair | None = None
        self._repairing: asyncio.Task[None] | None = None
        self.num_failures = 0
        self._loop = EngineLoop(
            engine,
            deliver=self._deliver,
            on_failure=lambda error: self._cross(self._on_failure, error),
            step_timeout_s=engine.plan.step_timeout_s,
            on_start=on_start,
            poll_interval_steps=engine.plan.scheduling.poll_interval_steps,
            thread=thread,
        )
        self._loop.start()

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Submit the request on first iteration; see EngineClient.generate."""
        self._check(request)
        processor = OutputProcessor(request, self._tokenizer)
        resumption = request.resumption
        if resumption is not None:
            for known in resumption.given:
                for output in processor.process(known):
                    yield output
            if processor.is_finished:
                return
            self._check(request)  # the state may have changed while the consumer read them
        stream = self._open(request)
        try:
            while not processor.is_finished:
                events = await stream.next()
                if resumption is not None:
                    resumption.note(events)
                outputs = processor.process(events)
                for index in processor.take_stopped():  # the generator may close at a yield
                    self._abort_index(stream, index)
                for output in outputs:
                    yield output
        finally:
            self._shut(stream, aborted=not processor.is_finished)

    async def abort(self, request_id: str | None) -> int:
        """Abort one request (None: all); return how many were open."""
        streams = [s for s in self._streams.values() if request_id in (None, s.name)]
        for stream in streams:
            self._abort_heard(stream)
        return len(streams)

    async def is_waiting(self, request_id: str) -> bool:
        """Return whether an open request is queued with all of its sequences."""
        ids = [s.engine_id for s in self._streams.values() if s.name == request_id]
        return bool(ids) and await self.ask(lambda engine: engine.is_waiting(ids[0]))

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; return False while requests are running."""
        return await self.ask(lambda engine: engine.flush_cache())

    async def page_hashes(self, limit: int) -> bytes:
        """Return hashes of cached pages; see EngineClient.page_hashes."""
        return await self.ask(lambda engine: engine.page_hashes(limit))

    async def adapter_slots(self) -> dict[int, int]:
        """Return lora_id -> slot of the adapters that occupy one."""
        return await self.ask(lambda engine: engine.adapters.by_lora_id)

    async def forget_adapter(self, lora_id: int) -> None:
        """Free the slot of an adapter, which no running or later request uses."""
        await self.ask(lambda engine: engine.adapters.forget(lora_id))

    def pin_adapter(self, lora_id: int, *, pinned: bool) -> None:
        """Pin an adapter to its slot once it has one, or unpin it."""
        self._loop.submit(lambda engine: engine.adapters.pin(lora_id, pinned=pinned))

    @property
    def is_paused(self) -> bool:
        """Whether the engine takes no steps, since `pause`."""
        return self._loop.is_paused

    async def pause(self, *, retracting: bool = False) -> None:
        """Take no steps until `unpause`; see EngineClient.pause."""

        def stop(engine: Stepping) -> None:
            self._loop.is_paused = True
            self._cross(self._on_outputs, engine.pause(retracting=retracting))

        await self.ask(stop)

    async def unpause(self) -> None:
        """Go on with all requests that are open."""

        def go_on(engine: Stepping) -> None:
            engine.unpause()
            self._loop.is_paused = False

        await self.ask(go_on)

    async def exchange(self, install: Callable[[], object]) -> None:
        """Run `install` between requests, once all open requests have finished.

        Later requests wait and run on what `install` puts in place; the prefix cache is dropped. An
        exception of `install` ends the engine.
        """
        if self.is_paused and self._streams:
            raise Unavailable(
                f"Generation is paused and {len(self._streams)} requests are open, which must end "
                "before; continue, or abort them."
            )
        done: asyncio.Future[None] = self._asyncio.create_future()
        self._questions.add(done)

        def attempt(engine: Stepping) -> None:
            if engine.has_work:
                self._loop.submit(attempt)  # retried after the next step
                return
            install()
            engine.flush_cache()
            engine.go_on()
            self._cross(self._on_answer, done)

        self._loop.submit(lambda engine: engine.hold())
        self._loop.submit(attempt)
        try:
            self.check_health()
            await done
        finally:
            self._questions.discard(done)

    async def ask(self, question: Callable[[Stepping], AnswerT]) -> AnswerT:
        """Run a function on the engine's thread and return its result."""
        answers: list[AnswerT] = []
        done: asyncio.Future[None] = self._asyncio.create_future()
        self._questions.add(done)
        self._loop.submit(
            lambda engine: answers.append(question(engine)),
            then=lambda: self._cross(self._on_answer, done),
        )
        try:
            self.check_health()
            await done
        finally:
            self._questions.discard(done)
        return answers[0]

    @property
    def num_open(self) -> int:
        """The number of open requests."""
        return len(self._streams)

    def refuse(self, reason: str | None) -> None:
        """Refuse later requests with Unavailable for a reason; None = admit them."""
        self._refusal = reason

    def limit_queue(self, plan: EnginePlan) -> None:
        """Apply this plan's queue limits to later requests."""
        self._plan = plan

    def stats(self) -> EngineStats:
        """Return the newest counters without blocking."""
        return self._loop.stats()

    def check_health(self) -> None:
        """Raise EngineError if the loop has failed or a step is overdue, and is not repaired."""
        if self._loop.failure is not None and (self._repair is None or self._failed.done()):
            raise self._loop.failure

    def repair_with(self, repair: Repair) -> None:
        """Call `repair` after each failure: it calls `restart`, or raises if that is of no use.

        Open requests end with the failure, and new ones wait meanwhile.
        """
        self._repair = repair
        self._loop.keeps_engine = True

    async def restart(self, repair: Callable[[], AnswerT], *, stop_s: float) -> AnswerT:
        """Run `repair` on the thread of the engine that has failed, and step again.

        stop_s:  timeout of the step in progress. Raises EngineError when it does not end.
        """
        stopped = asyncio.wrap_future(self._loop.call(lambda: None))
        if not (await asyncio.wait({stopped}, timeout=stop_s))[0]:
            raise EngineError(f"The step in progress has not ended for {stop_s:g} s.")
        result = await asyncio.wrap_future(self._loop.call(repair))
        self._loop.resume()
        return result

    async def failed(self) -> EngineError:
        """Wait until the engine fails for good or is closed; return the error."""
        return await asyncio.shield(self._failed)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for open ones; return False if the timeout ended some of
        them.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            for stream in self._streams.values():
                stream.fail(Unavailable("The server stopped during this answer. Please retry."))
            return False
        return True

    def fail(self, error: EngineError) -> None:
        """Fail the engine with `error`; callable from any thread."""
        self._loop.fail(error)

    def close(self) -> None:
        """Stop the loop. Open requests end with EngineError."""
        self._repair = None
        self._loop.close()
        if (failure := self._loop.failure) is not None:  # if it was being repaired
            self._cross(self._give_up, failure)

    # -- streams -----------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """Raise the errors that can be detected without the engine's thread."""
        self.check_health()
        if self._is_draining:
            raise Unavailable("The server is shutting down and takes no new requests.")
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        self._engine.check(request)
        if self._tokenizer is None and (request.sampling.stop or request.sampling.stop_regex):
            message = "This server has no tokenizer (model.skip_tokenizer): stop at token ids."
            raise InvalidRequest(message, "stop", "no_tokenizer")
        if any(stream.name == request.request_id for stream in self._streams.values()):
            raise InvalidRequest(f"Request id {request.request_id!r} is in use already.", "rid")
        limit = self._plan.max_open_sequences
        if request.sampling.n > limit:
            raise InvalidRequest(
                f"n is {request.sampling.n}; this server takes {limit} sequences at most.", "n"
            )
        tenant, num_open = request.tenant, self._num_open[request.tenant.name]
        if tenant.max_open is not None and num_open + request.sampling.n > tenant.max_open:
            raise RateLimited(
                f"{num_open} outputs of your key's requests are running or queued, and this request"
                f" asks for {request.sampling.n}; the limit is {tenant.max_open}. Try again when"
                " some have ended.",
                self._retry_after_s(),
                limit="max_open_requests",
            )
        if num_open + request.sampling.n > limit:
            raise QueueFull(
                f"{num_open} sequences are running or queued; the limit is {limit}.",
                retry_after_s=self._retry_after_s(),
            )
        self._check_queued_tokens(tenant, len(request.prompt_ids))

    def _check_queued_tokens(self, tenant: Tenant, num_tokens: int) -> None:
        allowed = self._plan.max_queued_tokens
        queued = sum(
            len(stream.request.prompt_ids)
            for stream in self._streams.values()
            if not stream.has_begun and stream.request.tenant.name == tenant.name
        )
        if allowed is not None and queued and queued + num_tokens > allowed:
            raise QueueFull(
                f"Prompts of {queued} tokens are queued; with {num_tokens} more they would be over"
                f" the limit of {allowed}.",
                self._retry_after_s(),
                limit="max_queued_tokens",
            )

    def _open(self, request: Request) -> _Stream:
        engine_id = f"{request.request_id}/{next(self._numbers)}"
        stream = _Stream(replace(request, request_id=engine_id), request.request_id)
        self._streams[engine_id] = stream
        self._is_idle.clear()
        self._num_open[request.tenant.name] += request.sampling.n
        self._loop.submit(lambda engine: self._add(engine, stream))
        return stream

    def _shut(self, stream: _Stream, *, aborted: bool) -> None:
        del self._streams[stream.engine_id]
        self._num_open[stream.request.tenant.name] -= stream.request.sampling.n
        if not self._streams:
            self._is_idle.set()
        if aborted:
            self._loop.submit(lambda engine: engine.abort(stream.engine_id))

    def _retry_after_s(self) -> float:
        """Estimate when the queue has room: 100 steps of the last duration, within 1 to 30 s."""
        step_s = self._loop.stats().last_step_s
        return float(min(30, max(1, round(step_s * 100))))

    def _abort_index(self, stream: _Stream, index: int) -> None:
        self._loop.submit(lambda engine: engine.abort(stream.engine_id, index))

    def _abort_heard(self, stream: _Stream) -> None:
        """Abort a request and deliver its end to the stream's reader."""
        self._loop.submit(
            lambda engine: self._cross(self._on_outputs, engine.abort(stream.engine_id))
        )

    # -- between the threads -------------------------------------------------------------------

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        """Pass on the outputs of a step. Runs on the engine's thread, once per step.

        Waits while the event loop is MAX_STEPS_AHEAD steps behind. Short steps release the
        interpreter so briefly that the event loop's thread would otherwise starve.
        """
        in_turn = self._ahead.acquire(timeout=MAX_WAIT_S)
        self._cross(self._on_step, outputs, in_turn)

    def _on_step(self, outputs: list[SequenceOutput], in_turn: bool) -> None:
        if in_turn:
            self._ahead.release()
        self._on_outputs(outputs)

    def _add(self, engine: Stepping, stream: _Stream) -> None:
        """Add a request. Runs on the engine's thread; a refusal fails the request, not the loop."""
        try:
            engine.add(stream.request)
        except RequestError as error:
            self._cross(stream.fail, error)

    def _cross(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the event loop; do nothing if it is closed."""
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(callback, *args)

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.error is not None:
                stream.fail(_exception_of(output.error))
            else:
                stream.has_begun = True
                stream.events.append(output)
                stream.arrived.set()

    @staticmethod
    def _on_answer(question: asyncio.Future[None]) -> None:
        if not question.done():
            question.set_result(None)

    def _on_failure(self, error: EngineError) -> None:
        self.num_failures += 1
        if self._repair is None:
            self._give_up(error)
            return
        self._end_all(error)
        self._repairing = asyncio.create_task(self._try_repair(self._repair, error))

    async def _try_repair(self, repair: Repair, failure: EngineError) -> None:
        try:
            await repair(failure)
        except Exception as error:  # a boundary: the failure stays, whatever the reason
            logger.error("engine: not repaired: %s", error)
            self._give_up(failure)

    def _give_up(self, error: EngineError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)
            self._end_all(error)

    def _end_all(self, error: EngineError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        for question in self._questions:
            if not question.done():
                question.set_exception(error)


def _exception_of(fault: RowFault) -> Exception:
    if fault.limit:
        return Unavailable(f"Timeout: {fault}.", limit=fault.limit)
    if fault.of_request:
        return InvalidRequest(f"The output cannot go on: {fault}.", code="constraint_failed")
    failure = NotFinite if fault == NOT_FINITE else EngineError
    return failure(f"The request failed: {fault}.")
