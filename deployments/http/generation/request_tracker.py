"""Running requests: from engine requests to one stream of outputs.

One HTTP request (or request of a handle) may hold many prompts; their outputs interleave. Opening
raises refusals before any header is sent. Closing, at any moment, aborts the sequences that still
run in the engine. Callers may give several requests the same name; the engine sees unique ids.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from remora.configs.errors import (
    CapacityError,
    EngineError,
    InvalidRequest,
    RateLimited,
    RequestTimedOut,
    Unavailable,
)
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.deployments.http.core.metrics import Metrics, RequestMetrics
from remora.deployments.http.core.tenants import Account, Tenants
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.observing.request_trace import RequestObservers
from remora.deployments.scoped_task import scoped_task
from remora.engine.protocols import EngineClient
from remora.engine.types import FinishReason, Output, Request

ItemT = TypeVar("ItemT")

Event = tuple[int, Output]
OutputStream = AsyncGenerator[Event, None]
"""Outputs of a running request, as (index of the prompt, output). Must be closed."""

_READY: Event = (0, Output(index=0, token_ids=(), text=""))


class _Clock:
    """Measures latencies and lengths of one request."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self.own = metrics
        self.started = time.monotonic()
        self._last: dict[tuple[int, int], float] = {}

    def note(self, prompt: int, output: Output) -> None:
        now, key, last = time.monotonic(), (prompt, output.index), self._last
        previous = last.get(key)
        if previous is not None:
            if output.token_ids:
                self.own.tokens(now - previous, len(output.token_ids))
        elif not last:
            self.own.first_token(now - self.started, output.queue_s)
        last[key] = now
        if output.finish_reason is not None:
            self.own.finished(output.finish_reason.value, output.num_output_tokens)


class _Intervals:
    """Joins outputs of a sequence to `num_tokens` tokens; never delays its first and last."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: dict[tuple[int, int], Output] = {}
        self._begun: set[tuple[int, int]] = set()

    def take(self, prompt: int, output: Output) -> Output | None:
        """Return this output joined with the earlier ones if it is due; None = it is held back."""
        key = (prompt, output.index)
        whole = output if key not in self._held else _joined(self._held.pop(key), output)
        is_due = key not in self._begun or whole.finish_reason is not None
        if is_due or len(whole.token_ids) >= self._num_tokens:
            self._begun.add(key)
            return whole
        self._held[key] = whole
        return None


def _joined(first: Output, second: Output) -> Output:
    """Return two outputs of one sequence as one."""
    logprobs = second.logprobs
    if first.logprobs is not None:
        logprobs = first.logprobs + (second.logprobs or ())
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of a request.

    timeout_s:        limit on the whole request; None = no limit
    queue_timeout_s:  limit on the time until its first step
    max_sequences:    most sequences of one request
    max_requests:     most concurrent requests of each tenant; None = any number
    wait_when_busy:   whether a request over `max_requests` waits, up to `queue_timeout_s`
    low_priority_first:  whether lower priorities run first
    """

    timeout_s: float | None
    queue_timeout_s: float
    max_sequences: int
    max_requests: int | None = None
    wait_when_busy: bool = False
    low_priority_first: bool = False

    @classmethod
    def of(cls, config: ServeConfig, plan: EnginePlan) -> Self:
        """Return the limits of a configuration and its plan."""
        return cls(
            timeout_s=config.api.request_timeout_s,
            queue_timeout_s=config.engine.queue_timeout_s,
            max_sequences=plan.max_open_sequences,
            max_requests=config.api.max_concurrent_requests,
            wait_when_busy=config.api.wait_when_busy,
            low_priority_first=plan.low_priority_first,
        )


class RequestTracker:
    """Opens requests and keeps track of them. `limits` may be replaced at any time.

    tenants:      whose requests they are
    is_draining:  whether the replica is shutting down
    observers:    notified of each request
    """

    def __init__(
        self, client: EngineClient, metrics: Metrics, limits: RequestLimits, tenants: Tenants
    ) -> None:
        self._client = client
        self._metrics = metrics
        self.limits = limits
        self.tenants = tenants
        self.is_draining = False
        self.observers = RequestObservers()
        self._numbers = itertools.count()
        self._open: dict[str, set[str]] = {}
        self._num_aborts = 0  # of all requests together
        self._starting: set[str] = set()  # claimed names of requests without an output

    async def open(
        self,
        context: RequestContext,
        requests: Sequence[Request],
        *,
        takes_place: bool = True,
        interval_tokens: int = 1,
    ) -> OutputStream:
        """Submit all requests, and wait for the first output if there are any requests.

        context:          its id names the whole request; the `request_id` of each prompt is a name
                          too
        takes_place:      whether the request counts towards `max_requests`
        interval_tokens:  outputs of a sequence are joined to this many tokens, except for the first

        Raises the engine's errors, RequestTimedOut, RateLimited for a limit of the tenant, and
        InvalidRequest for a priority that it may not use.
        """
        try:
            self._client.check_health()
        except EngineError as error:
            # Not a fault of the request: another replica, or this one's successor, can take it.
            raise Unavailable("The engine has stopped and is being replaced.") from error
        rid = context.request_id
        self._check_claims(context.claims)
        account = self.tenants.account(context.tenant)
        account.check_priority(requests, low_first=self.limits.low_priority_first)
        numbered = [
            replace(r, request_id=f"{rid}#{next(self._numbers)}", tenant=account.tenant)
            for r in requests
        ]
        if context.answer is not None and len(numbered) == 1:
            numbered = [context.answer.resumed(numbered[0])]
        if (
            context.answer is None or not context.answer.begun.tokens
        ):  # others are counted elsewhere
            self._admit(account, numbered)
        names: dict[str, set[str]] = {rid: {request.request_id for request in numbered}}
        for given, request in zip(requests, numbered, strict=True):
            names.setdefault(given.request_id, set()).add(request.request_id)
        intervals = None if interval_tokens == 1 else _Intervals(interval_tokens)
        outputs = self._run(context, account, names, numbered, takes_place, intervals)
        self._starting.update(context.claims)
        try:
            await self._wait_for_first(outputs, numbered)
        except BaseException as error:
            # This includes a caller that disconnected just after the first output arrived.
            await outputs.aclose()
            self._count_refusal(account, error)
            raise
        finally:
            self._starting.difference_update(context.claims)
        self._metrics.count_tenant_request(account.tenant.name, "started")
        return outputs

    def _check_claims(self, names: Sequence[str]) -> None:
        """Raise InvalidRequest for a name that an open request has, or that is given twice."""
        for number, name in enumerate(names):
            if name in self._open or name in self._starting or name in names[:number]:
                where = "twice in this request" if name in names[:number] else "in use already"
                message = f"Request id {name!r} is {where}; give each request its own."
                raise InvalidRequest(message, "rid", "duplicate_request_id")

    def _admit(self, account: Account, requests: Sequence[Request]) -> None:
        try:
            account.admit(requests)
        except RateLimited as error:
            self._count_refusal(account, error)
            raise

    def _count_refusal(self, account: Account, error: BaseException) -> None:
        if isinstance(error, CapacityError) and error.limit is not None:
            self._metrics.count_tenant_request(account.tenant.name, error.limit)

    async def _wait_for_first(self, outputs: OutputStream, requests: Sequence[Request]) -> None:
        """Wait until `outputs` is ready, up to the queue timeout if all requests are queued.

        While the engine is paused, the timeout begins again.
        """
        timeout_s = self.limits.queue_timeout_s
        async with scoped_task(anext(outputs)) as ready:
            await asyncio.wait({ready}, timeout=timeout_s)
            while not ready.done() and await self._all_wait(requests):
                if not self._client.is_paused:
                    raise Unavailable(
                        f"Queue timeout: the request waited {timeout_s:g} s "
                        "(engine.queue_timeout_s).",
                        5.0,
                        limit="queue_timeout_s",
                    )
                await asyncio.wait({ready}, timeout=timeout_s)
            await ready

    async def _all_wait(self, requests: Sequence[Request]) -> bool:
        waiting = [await self._client.is_waiting(request.request_id) for request in requests]
        return all(waiting)

    def check_size(self, num_sequences: int, param: str) -> None:
        """Raise InvalidRequest, which names `param`, if there are more sequences than allowed."""
        allowed = self.limits.max_sequences
        if num_sequences > allowed:
            raise InvalidRequest(
                f"{param}: the request asks for {num_sequences} sequences, one for each answer to "
                f"each prompt; this server takes {allowed} at most. Send fewer prompts at a time, "
                "or ask for fewer answers.",
                param,
            )

    async def abort(self, rid: str) -> int:
        """Abort requests and single prompts named `rid`; return the number of engine requests."""
        found = 0
        for request_id in tuple(self._open.get(rid, ())):
            found += await self._client.abort(request_id)
        return found

    async def abort_all(self) -> int:
        """Abort all requests, also where they wait for their turn; return how many the engine had.

        They end with `abort`.
        """
        self._num_aborts += 1
        return await self._client.abort(None)

    async def _run(
        self,
        context: RequestContext,
        account: Account,
        names: Mapping[str, set[str]],
        requests: Sequence[Request],
        takes_place: bool,
        intervals: _Intervals | None,
    ) -> OutputStream:
        """Yield _READY at the first output (or at the end if there is none), then all outputs.

        names:  the callers' names of the requests, with the engine's ids of each
        """
        for name, ids in names.items():
            self._open.setdefault(name, set()).update(ids)
        clock = _Clock(self._metrics.of_request(context.labels, account.tenant.name))
        for request in requests:
            clock.own.prompt(len(request.prompt_ids))
        unfinished = sum(request.sampling.n for request in requests)
        trace = self.observers.begin(context.request_id, requests, context.trace)
        reason = "disconnect"
        limits = self.limits
        most = limits.max_requests if takes_place else None
        is_single = len(requests) == 1
        num_aborts = self._num_aborts
        wait_s = limits.queue_timeout_s if limits.wait_when_busy else None
        try:
            async with AsyncExitStack() as held:
                await held.enter_async_context(account.concurrent.taken(most, wait_s=wait_s))
                is_aborted = num_aborts != self._num_aborts  # while it waited for its turn
                timeout_s = _shorter(limits.timeout_s, context.timeout_s)
                source = self._outputs(requests, timeout_s, is_aborted=is_aborted)
                events = await held.enter_async_context(aclosing(source))
                is_ready = False
                async for event in events:
                    prompt, output = (0, event) if is_single else event
                    clock.note(prompt, output)
                    account.spend(len(output.token_ids))
                    if trace is not None:
                        trace.note(prompt, output)
                    if output.finish_reason is not None:
                        unfinished -= 1
                    if not is_ready:
                        is_ready = True
                        yield _READY
                    due = output if intervals is None else intervals.take(prompt, output)
                    if due is not None:
                        yield prompt, due
                if not is_ready:
                    yield _READY
            clock.own.whole(time.monotonic() - clock.started)
        except Exception:
            reason = "error"
            raise
        finally:
            if unfinished:
                clock.own.count_finish(reason, unfinished)
            self.observers.end(trace, reason if unfinished else None)
            for name, ids in names.items():
                self._open[name] -= ids
                if not self._open[name]:
                    del self._open[name]

    def _outputs(
        self, requests: Sequence[Request], timeout_s: float | None, *, is_aborted: bool
    ) -> AsyncGenerator[Any, None]:
        """Return the outputs of a single request, or the events of several.

        is_aborted:  whether they end without having been submitted
        """
        if is_aborted:
            outputs: AsyncGenerator[Any, None] = _aborted(requests)
        elif len(requests) == 1:
            outputs = self._client.generate(requests[0])
        else:
            outputs = _merge(self._client, requests)
        # After `timeout_s` they raise RequestTimedOut.
        return outputs if timeout_s is None else _limited(outputs, timeout_s)


def _shorter(first: float | None, second: float | None) -> float | None:
    """Return the shorter of two limits; None = no limit."""
    given = [limit for limit in (first, second) if limit is not None]
    return min(given, default=None)


async def _aborted(requests: Sequence[Request]) -> AsyncGenerator[Any, None]:
    """Yield the end of each sequence, in the form of `RequestTracker._outputs`."""
    for prompt, request in enumerate(requests):
        for index in range(request.sampling.n):
            end = Output(index=index, token_ids=(), text="", finish_reason=FinishReason.ABORT)
            yield end if len(requests) == 1 else (prompt, end)


async def _limited(
    events: AsyncGenerator[ItemT, None], timeout_s: float
) -> AsyncGenerator[ItemT, None]:
    """Yield events until `timeout_s` has passed; then raise RequestTimedOut."""
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
    """Yield the outputs of all requests; the first error ends them all."""
    # The bound makes the engine's client merge outputs while the consumer is busy.
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(maxsize=len(requests))

    async def pump(prompt: int, request: Request) -> None:
        try:
            async with aclosing(client.generate(request)) as outputs:
                async for output in outputs:
                    await queue.put((prompt, output))
        except Exception as error:
            # A boundary: the consumer's task raises the error again.
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
