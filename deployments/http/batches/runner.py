"""Runs batches on capacity that online requests leave free.

A line starts only while no request is queued and less than half of the engine's rows are in use. It
has the lowest priority: online requests are scheduled first, and preempt it if
`engine.priority_preemption_gap` allows.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from remora.configs.errors import CapacityError, EngineError, RequestTimedOut
from remora.deployments.http.batches.input import BatchLine, Input, read_input
from remora.deployments.http.batches.results import EXPIRED, MAX_STARTS, Result, Results
from remora.deployments.http.batches.store import Batch, BatchStore
from remora.deployments.http.core.body_limits import apply
from remora.deployments.http.core.errors import answer_to, error_body, log_error
from remora.deployments.http.generation.endpoint import Endpoint
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState

POLL_S = 1.0  # between searches for a batch that no replica runs
TICK_S = 0.05  # between checks for free capacity
SAVE_S = 1.0  # between writes of progress
RETRY_S, ENGINE_RETRY_S = 10.0, 1.0
LOWEST_PRIORITY = -(2**31) + 1
_CANNOT_RUN = {
    "code": "server_error",
    "message": "The server cannot run this batch; its log says more.",
    "param": None,
    "line": None,
}

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class BatchRunner:
    """Runs the batches of a store, one after another, for the lifetime of the replica.

    endpoints:  endpoints by path, as named in a batch
    """

    def __init__(
        self, server: ServerState, store: BatchStore, endpoints: Mapping[str, Endpoint[Any]]
    ) -> None:
        self._served = server
        self._store = store
        self._endpoints = endpoints

    async def run(self) -> None:
        """Run batches until cancelled. A disk that cannot be read or written is tried again."""
        while True:
            try:
                if not await self.run_next():
                    await asyncio.sleep(POLL_S)
            except Exception:
                # A boundary: of the replica's task, whose end would go unnoticed. What comes here
                # is OSError, as of a full disk, or a bug in listing batches.
                log.exception("batches: paused for %g s", RETRY_S)
                await asyncio.sleep(RETRY_S)

    async def run_next(self) -> bool:
        """Run the oldest batch that no other replica runs; return False if there is none.

        A batch that cannot be run fails, so that it does not hold up the batches after it.
        Raises OSError if files cannot be read or written.
        """
        apply(self._served.config.limits)
        for listed in await asyncio.to_thread(self._store.unfinished):
            with self._store.claim(listed.id) as batch:
                if batch is None:
                    continue
                log.info("batches: %s started", batch.id)
                run = _Run(self._served, self._store, batch, self._endpoints[batch.endpoint])
                try:
                    await run.run()
                except OSError:
                    raise  # the disk's fault, not the batch's
                except Exception:
                    # A boundary: of one batch. What comes here is a bug, or a damaged file.
                    log.exception("batches: %s cannot be run", batch.id)
                    batch.errors = [dict(_CANNOT_RUN)]
                    await run.end("failed")
                log.info("batches: %s status=%s", batch.id, batch.status)
                return True
        return False


class _Run:
    """One batch, run by the holder of its lock."""

    def __init__(
        self, server: ServerState, store: BatchStore, batch: Batch, endpoint: Endpoint[Any]
    ) -> None:
        self._served, self._store, self._batch = server, store, batch
        self._endpoint = endpoint
        output, error = store.files.data_path(batch.output), store.files.data_path(batch.error)
        self._results = Results(output, error, store.starts_path(batch.id))
        self._running: dict[asyncio.Task[Result], BatchLine] = {}
        self._pending: deque[BatchLine] = deque()
        self._saved_at = 0.0

    async def run(self) -> None:
        """Run to completion, expiry or cancellation. Raises OSError if files cannot be written."""
        given = await self._read_input()
        if given is None:
            return
        try:
            ending = await self._run_lines(given)
        finally:
            await self._stop()
        if ending == "expired":
            lines = (*self._running.values(), *self._pending)
            self._batch.expired = len(lines)
            await _on_disk(self._results.append, [_expired(line) for line in lines])
        await self.end(ending)

    async def _read_input(self) -> Input | None:
        batch = self._batch
        path = self._store.files.data_path(batch.input_file_id)
        max_bytes = self._served.config.api.max_body_bytes
        try:
            given = await _on_disk(read_input, path, batch.endpoint, max_line_bytes=max_bytes)
            faults = given.faults
        except FileNotFoundError:
            faults = ({"code": "file_not_found", "message": "The input file has been deleted."},)
        if faults:
            batch.errors = list(faults)
            batch.become("failed")
            await _on_disk(self._store.save, batch)
            return None
        batch.total = len(given.lines)
        if batch.status == "validating":
            batch.become("in_progress")
        await _on_disk(self._store.save, batch)
        done = await _on_disk(self._results.resume)
        self._pending.extend(line for line in given.lines if line.custom_id not in done)
        return given

    async def _run_lines(self, given: Input) -> str:
        """Run the remaining lines; return the batch's final status."""
        starts = await _on_disk(self._results.starts)
        stuck = [line for line in self._pending if starts[line.number] >= MAX_STARTS]
        await _on_disk(self._results.append, [_given_up(line) for line in stuck])
        self._pending = deque(line for line in self._pending if line not in set(stuck))
        while self._pending or self._running:
            if await _on_disk(self._store.is_cancelled, self._batch.id):
                return "cancelled"
            if time.time() >= self._batch.expires_at:
                return "expired"
            await self._start(given)
            if self._running:
                await asyncio.wait(
                    self._running, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(TICK_S)
            await self._collect()
        return "completed"

    async def _start(self, given: Input) -> None:
        """Start as many lines as free capacity allows."""
        stats, plan = self._served.client.stats(), self._served.plan
        room = max(1, plan.max_running_requests // 2)
        room -= max(stats.num_running, len(self._running))
        if stats.num_waiting or room <= 0 or not self._pending:
            return
        lines = [self._pending.popleft() for _ in range(min(room, len(self._pending)))]
        await _on_disk(self._results.note_starts, lines)
        for line in lines:
            self._running[asyncio.create_task(self._answer(given, line))] = line

    async def _collect(self) -> None:
        """Write the results of finished lines, and every SAVE_S seconds the batch's progress."""
        ended = [task for task in self._running if task.done()]
        if not ended:
            return
        await _on_disk(self._results.append, [task.result() for task in ended])
        for task in ended:
            del self._running[task]
        if time.monotonic() - self._saved_at > SAVE_S:
            await self._save()

    async def _save(self) -> None:
        self._batch.completed = self._results.num_completed
        self._batch.failed = self._results.num_failed
        self._batch.usage = self._results.usage.show()
        await _on_disk(self._store.save, self._batch)
        self._saved_at = time.monotonic()

    async def _stop(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def end(self, status: str) -> None:
        """Save the final status, and make the results' files available."""
        batch, files = self._batch, self._store.files
        if status == "cancelled":
            batch.become("cancelling")
        else:
            batch.become("finalizing")
        await self._save()
        for file_id, num, kind in (
            (batch.output, batch.completed, "output"),
            (batch.error, batch.failed, "error"),
        ):
            if num:
                name = f"{batch.id}_{kind}.jsonl"
                await _on_disk(
                    files.publish, file_id, filename=name, purpose="batch_output", owner=batch.owner
                )
        batch.become(status)
        await self._save()

    async def _answer(self, given: Input, line: BatchLine) -> Result:
        """Return the result of one line, or its error as a result."""
        rid = uuid.uuid4().hex
        try:
            body = await asyncio.to_thread(given.body, line)
            answer = await self._ask({**body, "stream": False}, rid)
        except Exception as error:
            # A boundary: of one line, as `Edge` is of one request. Templates, parsers and the
            # engine may raise anything; the line's result has the error.
            log_error(error, rid)
            return _result(line, rid, answer_to(error).status, error_body(error))
        return _result(line, rid, 200, answer)

    async def _ask(self, body: dict[str, Any], rid: str) -> Any:
        batch = self._batch
        context = RequestContext(
            request_id=rid, owner=batch.owner, tenant=batch.tenant, viewer=batch.owner or None
        )
        job, ignored = await self._endpoint.job(self._served, body, context)
        self._served.field_log.note(ignored)
        lowest = LOWEST_PRIORITY
        if self._served.plan.low_priority_first:
            lowest = -lowest
        requests = [replace(request, priority=lowest) for request in job.requests]
        failures = 0
        while True:
            try:
                async with aclosing(
                    await self._served.calls.open(job.context, requests)
                ) as outputs:
                    return await job.result(outputs)
            except RequestTimedOut:
                raise
            except CapacityError as error:
                await asyncio.sleep(error.retry_after_s)
            except EngineError:
                failures += 1
                if failures == MAX_STARTS:
                    raise
                await asyncio.sleep(ENGINE_RETRY_S)


async def _on_disk(
    work: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
) -> ResultT:
    """Run file work of a batch in a thread; wait for its end even when cancelled.

    The batch's lock is released only after that, so two replicas never write the same files.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    is_cancelled = False
    while not working.done():
        try:
            await asyncio.wait({working})
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError from working.exception()
    return working.result()


def _result(line: BatchLine, rid: str, status: int, body: Mapping[str, Any]) -> Result:
    response = {"status_code": status, "request_id": rid, "body": body}
    return Result(_record(line, response, None), status != 200)


def _expired(line: BatchLine) -> Result:
    error = {"code": EXPIRED, "message": "The batch's time was over before its turn came."}
    return Result(_record(line, None, error), True)


def _given_up(line: BatchLine) -> Result:
    message = f"The server has stopped {MAX_STARTS} times while it worked on this request."
    return Result(_record(line, None, {"code": "server_error", "message": message}), True)


def _record(line: BatchLine, response: Any, error: Any) -> dict[str, Any]:
    name = f"batch_req_{uuid.uuid4().hex}"
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
