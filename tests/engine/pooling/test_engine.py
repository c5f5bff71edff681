"""PoolingEngine: every request has one result, independent of batch and order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.configs.errors import EngineError, InvalidRequest, PromptTooLong, QueueFull
from remora.engine.client import LocalEngineClient
from remora.engine.pooling.engine import PoolingEngine
from remora.engine.pooling.model import PoolingModel
from remora.engine.pooling.row import Row
from remora.engine.types import FinishReason, FloatArray, PoolingParams, Request, SamplingParams
from tests.deployments.fakes import make_plan
from tests.moments import cancelled, nothing_left

VOCAB = 50
PLAN = replace(
    make_plan(), task="embed", device="cpu", max_model_len=40, max_step_tokens=64, num_threads=3
)


class Sums:
    """Returns sum and length of each row; NaN for rows that contain a 7."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, rows: Sequence[Row]) -> FloatArray:
        self.batches.append(sum(len(row.token_ids) for row in rows))
        return np.array([self._of(row) for row in rows], dtype=np.float32)

    def hidden(self, row: Row) -> FloatArray:
        return np.array([[token] for token in row.token_ids], dtype=np.float32)

    @staticmethod
    def _of(row: Row) -> list[float]:
        total = float("nan") if 7 in row.token_ids else float(sum(row.token_ids))
        return [total, float(len(row.token_ids)), float(row.second or 0)]


def make_engine(**plan: object) -> tuple[PoolingEngine, Sums]:
    model = Sums()
    changed = replace(PLAN, **plan)  # type: ignore[arg-type]
    return PoolingEngine(changed, cast("PoolingModel", model), vocab_size=VOCAB), model


def request(name: str, ids: list[int], priority: int = 0, **pooling: object) -> Request:
    return Request(
        request_id=name,
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=1),
        priority=priority,
        pooling=PoolingParams(**pooling),  # type: ignore[arg-type]
    )


ROWS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), max_size=30)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, aborted=st.sets(st.integers(0, 29)), whole=st.sets(st.integers(0, 29)))
def test_every_request_has_one_result_equal_to_that_alone(
    rows: list[list[int]], aborted: set[int], whole: set[int]
) -> None:
    engine, model = make_engine()
    for index, row in enumerate(rows):
        engine.add(request(str(index), row, per_token=index in whole))
    for index in aborted:
        engine.abort(str(index))
    found: dict[int, FloatArray] = {}
    while engine.has_work:
        for output in engine.step():
            index = int(output.request_id)
            assert index not in found
            assert index not in aborted
            if output.pooled is None:
                assert 7 in rows[index]
                assert output.error is not None
                found[index] = np.zeros(0, np.float32)
                continue
            found[index] = output.pooled
            alone = (
                Sums().hidden(Row(rows[index])) if index in whole else Sums()([Row(rows[index])])[0]
            )
            assert output.pooled.tolist() == alone.tolist()
    engine.close()
    assert found.keys() == set(range(len(rows))) - aborted
    assert max(model.batches, default=0) <= PLAN.max_step_tokens
    stats = engine.stats()
    assert stats.num_queued_tokens == stats.num_waiting == 0
    assert stats.finished_total + stats.aborted_total == len(rows)


def test_requests_run_by_priority_then_arrival() -> None:
    engine, _ = make_engine(max_running_requests=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        engine.add(request(name, [1], priority))
    order = [output.request_id for _ in range(4) for output in engine.step()]
    engine.close()
    assert order == ["b", "d", "a", "c"]


def test_requests_that_can_never_run_are_refused() -> None:
    engine, _ = make_engine()
    for ids, error in (([], InvalidRequest), ([VOCAB], InvalidRequest), ([1] * 41, PromptTooLong)):
        with pytest.raises(error):
            engine.add(request("a", ids))
    generating = Request(request_id="a", prompt_ids=[1], sampling=SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="embeddings"):
        engine.add(generating)
    engine.close()


async def vector(client: LocalEngineClient, row: Request) -> FloatArray | None:
    found = None
    async with aclosing(client.generate(row)) as outputs:
        async for output in outputs:
            assert output.finish_reason is FinishReason.STOP
            found = output.pooled
    return found


async def test_the_client_runs_it_as_any_engine() -> None:
    engine, _ = make_engine(max_running_requests=4, max_queued_requests=2)
    client = LocalEngineClient(engine, None)
    results = await asyncio.gather(*(vector(client, request(str(i), [i, 1])) for i in range(6)))
    assert [None if one is None else one.tolist() for one in results] == [
        [i + 1.0, 2.0, 0.0] for i in range(6)
    ]
    many = [vector(client, request(str(i), [1])) for i in range(9)]
    outcomes = await asyncio.gather(*many, return_exceptions=True)
    assert sum(isinstance(outcome, QueueFull) for outcome in outcomes) == 3
    with pytest.raises(EngineError, match="not finite"):
        await vector(client, request("bad", [7]))
    assert await vector(client, request("next", [1])) is not None
    assert await client.drain(1.0)
    client.close()


@pytest.mark.parametrize("again", [False, True])
async def test_a_request_cancelled_at_any_moment_leaves_the_queue(again: bool) -> None:
    engine, _ = make_engine()
    client = LocalEngineClient(engine, None)
    async with nothing_left():
        for moment in range(40):
            await cancelled(vector(client, request("a", [moment])), moment, again=again)
    assert await client.drain(1.0)
    assert await client.flush_cache()
    assert client.stats().num_queued_tokens == 0
    client.close()
