"""The engine of pooling models: requests in, embeddings or scores out, without KV and sampling.

It implements the same protocol as `Engine` (`Stepping`), so that loop, client, limits, aborts,
draining and metrics are shared. A step takes whole rows in order until its token budget is used.
On a CPU, the rows of a step are divided between threads, which synchronize once per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.configs.planning.plan import EnginePlan
from remora.engine.pooling.model import PoolingModel
from remora.engine.pooling.row import Row
from remora.engine.scheduler.adapter_slots import AdapterSlots
from remora.engine.types import (
    EngineStats,
    FinishReason,
    FloatArray,
    PoolingParams,
    Request,
    RowFault,
    SequenceOutput,
)

NOT_FINITE = RowFault("the model's output is not finite")


@dataclass(slots=True)
class _Waiting:
    request: Request
    pooling: PoolingParams
    arrived_s: float
    priority: int

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def row(self) -> Row:
        return Row(self.request.prompt_ids, self.pooling.second)


class PoolingEngine:
    """A queue of requests and a pooling model."""

    def __init__(
        self,
        plan: EnginePlan,
        model: PoolingModel,
        *,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.adapters = AdapterSlots(0)
        self._model = model
        self._vocab_size = vocab_size
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}  # in the order of arrival
        self._has_priorities = False
        self._threads: ThreadPoolExecutor | None = None
        if plan.device == "cpu" and plan.num_threads > 1:
            self._threads = ThreadPoolExecutor(
                plan.num_threads - 1,
                "remora-rows",
                initializer=torch.set_num_threads,
                initargs=(1,),
            )
        self._num_queued_tokens = 0
        self._prompt_tokens = self._finished = self._aborted = self._steps = 0
        self._step_time_s = self._last_step_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether requests are waiting."""
        return bool(self._waiting)

    def check(self, request: Request) -> None:
        """Raise PromptTooLong or InvalidRequest if the request can never run. Thread-safe."""
        ids, limit = request.prompt_ids, self.plan.max_sequence_tokens
        if request.pooling is None:
            message = "This model does not generate text; it computes embeddings or scores."
            raise InvalidRequest(message, code="not_offered")
        if not ids:
            raise InvalidRequest("The input is empty; at least one token is required.", "input")
        if len(ids) > limit:
            raise PromptTooLong(
                f"The input has {len(ids)} tokens; the model accepts at most {limit}. Shorten it, "
                "or send truncate_prompt_tokens: -1.",
                "input",
            )
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise InvalidRequest(
                f"The input has token ids outside the vocabulary: 0 to {self._vocab_size - 1}.",
                "input",
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `check` raises."""
        self.check(request)
        assert request.pooling is not None
        if request.request_id in self._waiting:
            raise InvalidRequest(f"Request id {request.request_id!r} is already in use.", "rid")
        priority = 0
        if self.plan.scheduling.use_priorities:
            priority = -request.priority if self.plan.low_priority_first else request.priority
        self._has_priorities |= priority != 0
        waiting = _Waiting(request, request.pooling, self._clock(), priority)
        self._waiting[request.request_id] = waiting
        self._num_queued_tokens += waiting.num_tokens

    def is_waiting(self, request_id: str) -> bool:
        """Return whether the request waits; between two steps, all open requests do."""
        return request_id in self._waiting

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """Abort a waiting request."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return []
        self._num_queued_tokens -= waiting.num_tokens
        self._aborted += 1
        return [_output(waiting, FinishReason.ABORT)]

    def step(self) -> list[SequenceOutput]:
        """Compute the next rows. Raises the model's exceptions."""
        started = self._clock()
        chosen = self._choose()
        results = self._compute(chosen)
        self._steps += 1
        self._last_step_s = self._clock() - started
        self._step_time_s += self._last_step_s
        outputs = []
        for waiting, result in zip(chosen, results, strict=True):
            is_good = bool(np.isfinite(result).all())
            self._finished += is_good
            self._aborted += not is_good
            outputs.append(
                _output(
                    waiting,
                    FinishReason.STOP if is_good else FinishReason.ABORT,
                    pooled=result if is_good else None,
                    error=None if is_good else NOT_FINITE,
                    queue_s=started - waiting.arrived_s,
                )
            )
        return outputs

    def flush_cache(self) -> bool:
        """Return whether no request waits; there is no cache."""
        return not self._waiting

    def hold(self) -> None:
        """Not supported: `make_pooling_plan` refuses weight updates."""
        raise NotImplementedError

    def go_on(self) -> None:
        """Not supported, as `hold`."""
        raise NotImplementedError

    def pause(self, *, retracting: bool) -> list[SequenceOutput]:
        """Do nothing: between two steps all requests wait."""
        return []

    def unpause(self) -> None:
        """Do nothing, as `pause`."""

    def page_hashes(self, limit: int) -> bytes:
        """Return no hashes: there is no cache."""
        return b""

    def stats(self) -> EngineStats:
        """Return the counters as of the last step."""
        return EngineStats(
            num_running=0,
            num_waiting=len(self._waiting),
            num_queued_tokens=self._num_queued_tokens,
            num_pages=0,
            num_free_pages=0,
            num_cached_pages=0,
            num_held_pages=0,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=0,
            generated_tokens_total=0,
            preemptions_total=0,
            evicted_pages_total=0,
            aborted_total=self._aborted,
            finished_total=self._finished,
            steps_total=self._steps,
            step_time_total_s=self._step_time_s,
            last_step_s=self._last_step_s,
        )

    def close(self) -> None:
        """Stop the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _choose(self) -> list[_Waiting]:
        """Take requests by priority and arrival, up to the step's token budget."""
        queue = list(self._waiting.values())
        if self._has_priorities:
            queue.sort(key=lambda waiting: -waiting.priority)  # stable
        chosen: list[_Waiting] = []
        room = self.plan.max_step_tokens
        for waiting in queue:
            if chosen and (
                waiting.num_tokens > room or len(chosen) == self.plan.max_running_requests
            ):
                break
            chosen.append(waiting)
            room -= waiting.num_tokens
        for waiting in chosen:
            del self._waiting[waiting.request.request_id]
            self._num_queued_tokens -= waiting.num_tokens
            self._prompt_tokens += waiting.num_tokens
        return chosen

    def _compute(self, chosen: Sequence[_Waiting]) -> list[FloatArray]:
        results: list[FloatArray | None] = [None] * len(chosen)

        def run(part: Sequence[int]) -> None:
            whole = [index for index in part if chosen[index].pooling.per_token]
            pooled = [index for index in part if not chosen[index].pooling.per_token]
            for index in whole:
                one = chosen[index]
                compute = self._model.scores if one.pooling.is_scored else self._model.hidden
                results[index] = compute(one.row)
            if pooled:
                numbers = self._model([chosen[index].row for index in pooled])
                for index, row in zip(pooled, numbers, strict=True):
                    results[index] = row

        first, *others = _divide([w.num_tokens for w in chosen], self._num_parts(len(chosen)))
        running = [self._threads.submit(run, part) for part in others if self._threads]
        num_threads = torch.get_num_threads()
        if running:
            torch.set_num_threads(1)
        try:
            run(first)
        finally:
            if running:
                torch.set_num_threads(num_threads)
        for one in running:
            one.result()
        return [result for result in results if result is not None]

    def _num_parts(self, num_rows: int) -> int:
        return 1 if self._threads is None else min(num_rows, self.plan.num_threads)


def _divide(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide rows into parts of similar size, with the rows of a part sorted by length."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += sizes[index]
    return parts


def _output(
    waiting: _Waiting,
    reason: FinishReason,
    *,
    pooled: FloatArray | None = None,
    error: RowFault | None = None,
    queue_s: float = 0.0,
) -> SequenceOutput:
    return SequenceOutput(
        request_id=waiting.request.request_id,
        index=0,
        token_ids=(),
        pooled=pooled,
        finish_reason=reason,
        error=error,
        queue_s=queue_s,
    )
