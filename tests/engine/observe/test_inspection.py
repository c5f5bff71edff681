"""What can be seen of a running engine, as its configuration asks for it."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from remora.configs.errors import NotFinite
from remora.configs.schema import ServeConfig
from remora.engine.engine import Engine
from remora.engine.observe.inspection import Inspection, inspect
from remora.engine.observe.step_records import StepRecords
from remora.engine.types import Request, SamplingParams
from tests.engine.fakes import FakeRunner, make_engine, make_plan


def inspected(runner: FakeRunner | None = None, **sections: Any) -> tuple[Engine, Inspection]:
    engine = make_engine(runner=runner)
    config = ServeConfig.model_validate({"model": {"path": "fake"}, **sections})
    return engine, inspect(engine, config)


def run(engine: Engine, num_tokens: int = 10, name: str = "a") -> None:
    """Answer one request with so many tokens: as many steps."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_ids=[1, 2, 3], sampling=sampling))
    while engine.has_work:
        engine.step()


@pytest.mark.observes("metrics.log_step_interval")
@pytest.mark.parametrize(("every", "lines"), [(None, []), (4, [4, 8]), (3, [3, 6, 9])])
def test_what_runs_is_logged_each_so_many_decode_steps(
    caplog: pytest.LogCaptureFixture, every: int | None, lines: list[int]
) -> None:
    engine, _ = inspected(metrics={"log_step_interval": every})
    with caplog.at_level(logging.INFO, "remora"):
        run(engine)

    assert [int(n) for n in re.findall(r"decode step (\d+): running 1", caplog.text)] == lines


@pytest.mark.observes("debug.log_step_times")
@pytest.mark.parametrize("is_on", [True, False])
def test_where_the_time_of_steps_went_is_logged(
    caplog: pytest.LogCaptureFixture, is_on: bool
) -> None:
    engine, _ = inspected(debug={"log_step_times": is_on})
    with caplog.at_level(logging.INFO, "remora"):
        run(engine, 3)

    found = re.findall(r"step (\d+): rows 1, tokens (\d+), forward .* ms, sample", caplog.text)
    assert found == ([("1", "3"), ("2", "1"), ("3", "1")] if is_on else [])


@pytest.mark.observes("metrics.max_step_records")
def test_the_latest_steps_are_kept_and_no_more() -> None:
    engine, inspection = inspected(metrics={"max_step_records": 4})
    run(engine)

    assert inspected()[1].records is None
    assert inspection.records is not None
    records = inspection.records.recent()
    assert [record["step_id"] for record in records] == [7, 8, 9, 10]
    assert records[-1]["num_tokens"] == records[-1]["num_sampled"] == 1


@pytest.mark.observes("metrics.step_records_s")
def test_old_steps_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("remora.engine.observe.step_records.time.time", lambda: now)
    engine, inspection = inspected(metrics={"max_step_records": 100, "step_records_s": 5.0})
    assert isinstance(inspection.records, StepRecords)
    inspection.records._clock = lambda: now
    run(engine, 3)
    now += 4.0
    run(engine, 2, "b")
    assert len(inspection.records.recent()) == 5
    now += 3.0
    assert [record["step_id"] for record in inspection.records.recent()] == [4, 5]


def test_how_long_a_sequence_waited_is_told_with_its_tokens() -> None:
    now = 0.0
    engine = make_engine(make_plan(max_running_requests=1), clock=lambda: now)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    for name in "ab":
        engine.add(Request(request_id=name, prompt_ids=[1, 2, 3], sampling=sampling))
    waits: dict[str, float] = {}
    while engine.has_work:
        waits |= {output.request_id: output.queue_s for output in engine.step()}
        now += 1.0

    assert waits == {"a": 0.0, "b": 2.0}


@pytest.mark.observes("debug.fail_on_nan")
@pytest.mark.parametrize("is_on", [True, False])
def test_logits_that_are_not_finite_end_the_engine_or_their_request(is_on: bool) -> None:
    runner = FakeRunner()
    runner.bad_rows = {0}
    engine, _ = inspected(runner, debug={"fail_on_nan": is_on})

    if is_on:
        with pytest.raises(NotFinite, match=r"1 of 1 sequences .*debug\.fail_on_nan"):
            run(engine)
    else:
        run(engine)
        assert engine.stats().aborted_total == 1
