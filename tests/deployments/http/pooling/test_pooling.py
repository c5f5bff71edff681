"""Responses with many numbers are built and encoded off the event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from remora.deployments.http.core import wire
from remora.deployments.http.core.wire import dumps, written
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.pooling.requests import NO_TEXT, OFF_LOOP_NUMBERS, PoolingJob
from remora.engine.types import FinishReason, FloatArray, Request, SequenceOutput


async def outputs_of(*vectors: FloatArray) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
    for index, vector in enumerate(vectors):
        yield index, make_output(vector)


def make_output(vector: FloatArray) -> SequenceOutput:
    return SequenceOutput(
        request_id="a",
        index=0,
        token_ids=(),
        finish_reason=FinishReason.STOP,
        pooled=vector,
    )


@pytest.mark.parametrize(
    ("size", "is_on_loop"), [(OFF_LOOP_NUMBERS // 2, True), (OFF_LOOP_NUMBERS, False)]
)
async def test_what_has_many_numbers_is_told_off_the_loop(size: int, is_on_loop: bool) -> None:
    threads = []

    def tell(results: list[FloatArray]) -> int:
        threads.append(threading.current_thread())
        return len(results)

    request = Request(request_id="a", prompt_ids=[1], sampling=NO_TEXT)
    job = PoolingJob(context=RequestContext(request_id="a"), requests=(request,) * 2, tell=tell)
    vector = np.zeros(size, np.float32)
    outputs: Any = outputs_of(vector, vector)
    calls: OutputStream = outputs

    assert await job.result(calls) == 2
    assert (threads == [threading.current_thread()]) is is_on_loop


async def test_many_entries_are_written_one_by_one_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = set()

    def watched(value: Any) -> bytes:
        threads.add(threading.current_thread())
        return dumps(value)

    monkeypatch.setattr(wire, "dumps", watched)
    answer = {"object": "list", "data": [{"embedding": [0.25, index]} for index in range(100)]}
    few = {"data": answer["data"][:3]}

    assert dumps(await written(answer)) == dumps(answer)
    assert threading.current_thread() not in threads
    assert threads
    assert await written(few) is few
