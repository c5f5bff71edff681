"""Running calls: from engine requests to one stream of outputs, its first output already there.

A call is one HTTP request (or handle call) and may hold many prompts; their outputs interleave.
Refusals are raised when a call is opened, before any header is sent. Closing a call, at any
moment, aborts what it still has in the engine. Callers name their calls, and the requests of a
call, as they like, several alike if they want; the engine only ever sees ids of ours.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Self

from remora.configs.errors import EngineError, InvalidRequest, RequestTimedOut, Unavailable
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.deployments.http.core.concurrency import ConcurrencyLimiter
from remora.deployments.http.core.metrics import CallMetrics, Metrics
from remora.deployments.http.generation.resumption import resumable
from remora.deployments.observing.request_trace import RequestObservers
from remora.deployments.scoped_task import scoped_task
from remora.engine.protocols import EngineClient
from remora.engine.types import Output, Request

Event = tuple[int, Output]


class OutputStream:
    """Outputs of a running call, as (index of the prompt, output). Must be closed."""

    def __init__(self, first: Event | None, rest: AsyncGenerator[Event, None]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> OutputStream:
        return self

    def __anext__(self) -> Awaitable[Event]:
        # Not a coroutine of its own: it would stand between each event and its reader.
        return self._rest.__anext__() if self._first is None else self._take_first(self._first)

    async def _take_first(self, first: Event) -> Event:
        self._first = None
        return first

    async def aclose(self) -> None:
        """End the call; what is not finished is aborted."""
        await self._rest.aclose()


@dataclass(slots=True, eq=False)
class _Clock:
    """Latencies and lengths of one call."""

    metrics: Metrics
    own: CallMetrics
    started: float
    last: dict[tuple[int, int], float]

    def note(self, prompt: int, output: Output) -> None:
        now, key = time.monotonic(), (prompt, output.index)
        if not self.last:
            self.own.first_token(now - self.started, output.queue_s)
        elif output.token_ids and key in self.last:
            self.own.tokens(now - self.last[key], len(output.token_ids))
        self.last[key] = now
        if output.finish_reason is not None:
            self.metrics.count_finish(output.finish_reason.value)
            self.own.finished(output.num_output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a call may take.

    timeout_s:        of the whole call; None = as long as it likes
    queue_timeout_s:  until its turn
    max_sequences:    of the call
    max_calls:        that run at once; None = any number
    wait_when_busy:   whether one more waits, for as long as in the queue
    """

    timeout_s: float | None
    queue_timeout_s: float
    max_sequences: int
    max_calls: int | None = None
    wait_when_busy: bool = False

    @classmethod
    def of(cls, config: ServeConfig, plan: EnginePlan) -> Self:
        """Read them from a configuration and its plan."""
        return cls(
            timeout_s=config.api.request_timeout_s,
            queue_timeout_s=config.engine.queue_timeout_s,
            max_sequences=plan.max_open_sequences,
            max_calls=config.api.max_concurrent_requests,
            wait_when_busy=config.api.wait_when_busy,
        )


class RequestTracker:
    """Opens calls and knows which are open. Their limits may be replaced at any time.

    is_draining:  whether the replica is about to stop
    observers:    who is told of each call
    """

    def __init__(self, client: EngineClient, metrics: Metrics, limits: RequestLimits) -> None:
        self._client = client
        self._metrics = metrics
        self.limits = limits
        self.is_draining = False
        self.observers = RequestObservers()
        self._numbers = itertools.count()
        self._open: dict[str, set[str]] = {}
        self._places = ConcurrencyLimiter()

    async def open(
        self, rid: str, requests: Sequence[Request], *, needs_place: bool = True
    ) -> OutputStream:
        """Submit all requests and wait for the first output of any; without requests, of none.

        rid:  names the whole call; each request is also known under its own `request_id`
        needs_place:  whether it counts as one of those that run at once

        Raises what the engine raises, InvalidRequest for a call that could never be taken, and
        RequestTimedOut.
        """
        wanted = sum(request.sampling.n for request in requests)
        self.check_size(wanted, "prompt" if len(requests) > 1 else "n")
        try:
            self._client.check_health()
        except EngineError as error:
            # Not this request's failure: another replica, or this one's successor, can take it.
            raise Unavailable("The engine has stopped and is being replaced.") from error
        numbered = [replace(r, request_id=f"{rid}#{next(self._numbers)}") for r in requests]
        if len(numbered) == 1:
            numbered = [resumable(numbered[0])]
        names: dict[str, set[str]] = {rid: {request.request_id for request in numbered}}
        for given, request in zip(requests, numbered, strict=True):
            names.setdefault(given.request_id, set()).add(request.request_id)
        events = self._run(rid, names, numbered, needs_place)
        try:
            return OutputStream(await self._first_of(events, numbered), events)
        except BaseException:
            # Also a caller that went away just after the first event had come.
            await events.aclose()
            raise

    async def _first_of(
        self, events: AsyncGenerator[Event, None], requests: Sequence[Request]
    ) -> Event | None:
        """Wait for the first event, but not for longer than a queue's time in the queue."""
        timeout_s = self.limits.queue_timeout_s
        async with scoped_task(anext(events, None)) as first:
            await asyncio.wait({first}, timeout=timeout_s)
            if not first.done() and await self._all_wait(requests):
                message = f"The request waited for {timeout_s:g} s without its turn."
                raise Unavailable(message, 5.0, limit="queue_timeout_s")
            return await first

    async def _all_wait(self, requests: Sequence[Request]) -> bool:
        waiting = [await self._client.is_waiting(request.request_id) for request in requests]
        return all(waiting)

    def check_size(self, num_sequences: int, param: str) -> None:
        """Raise InvalidRequest for a call that could never be taken; `param` is to blame."""
        allowed = self.limits.max_sequences
        if num_sequences > allowed:
            raise InvalidRequest(
                f"{param}: the request asks for {num_sequences} sequences, one for each answer to "
                f"each prompt; this server takes {allowed} at most. Send fewer prompts at a time, "
                "or ask for fewer answers.",
                param,
            )

    async def abort(self, rid: str) -> int:
        """Abort all requests of the calls, and all requests, named `rid`; returns how many."""
        found = 0
        for request_id in tuple(self._open.get(rid, ())):
            found += await self._client.abort(request_id)
        return found

    async def _run(
        self,
        rid: str,
        names: Mapping[str, set[str]],
        requests: Sequence[Request],
        needs_place: bool,
    ) -> AsyncGenerator[Event, None]:
        """Yield the outputs of requests that callers know by `names`."""
        for name, ids in names.items():
            self._open.setdefault(name, set()).update(ids)
        clock = _Clock(self._metrics, self._metrics.of_call(), time.monotonic(), {})
        for request in requests:
            clock.own.prompt(len(request.prompt_ids))
        unfinished = sum(request.sampling.n for request in requests)
        trace = self.observers.begin(rid, requests)
        reason = "disconnect"
        limits = self.limits
        most = limits.max_calls if needs_place else None
        wait_s = limits.queue_timeout_s if limits.wait_when_busy else None
        try:
            async with (
                self._places.taken(most, wait_s=wait_s),
                aclosing(self._within_deadline(_merge(self._client, requests))) as events,
            ):
                async for prompt, output in events:
                    clock.note(prompt, output)
                    if trace is not None:
                        trace.note(prompt, output)
                    unfinished -= output.finish_reason is not None
                    yield prompt, output
            clock.own.whole(time.monotonic() - clock.started)
        except Exception:
            reason = "error"
            raise
        finally:
            if unfinished:
                self._metrics.count_finish(reason, unfinished)
            self.observers.end(trace, reason if unfinished else None)
            for name, ids in names.items():
                self._open[name] -= ids
                if not self._open[name]:
                    del self._open[name]

    def _within_deadline(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        timeout_s = self.limits.timeout_s
        return events if timeout_s is None else _limited(events, timeout_s)


async def _limited(
    events: AsyncGenerator[Event, None], timeout_s: float
) -> AsyncGenerator[Event, None]:
    """Pass events on until `timeout_s` has passed; then raise RequestTimedOut."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with aclosing(events):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise RequestTimedOut(f"The request took longer than {timeout_s:g} s.") from None
            yield event


async def _merge(client: EngineClient, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
    """Yield the outputs of all requests as they come; the first error ends them all."""
    if len(requests) == 1:
        async with aclosing(client.generate(requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # The bound makes the engine's client merge outputs while the consumer is busy.
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(maxsize=len(requests))

    async def pump(prompt: int, request: Request) -> None:
        try:
            async with aclosing(client.generate(request)) as outputs:
                async for output in outputs:
                    await queue.put((prompt, output))
        except Exception as error:
            # A boundary: the error goes on in the consumer's task.
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
