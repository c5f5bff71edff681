"""The engine's thread: order of commands, failure, the watchdog."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from remora.configs.errors import ConfigError, EngineError, StepTimeout
from remora.engine.engine import Engine
from remora.engine.loop import EngineLoop
from remora.engine.thread import EngineThread
from remora.engine.types import FinishReason, Request, SamplingParams, SequenceOutput, StepPlan
from tests.engine.fakes import FakeRunner, expected_output, make_engine

WAIT_S = 30


class Probe:
    """A running loop and what it reported."""

    def __init__(self, runner: FakeRunner, step_timeout_s: float = 30.0) -> None:
        self.tokens: list[int] = []
        self.finished = threading.Event()
        self.failed = threading.Event()
        self.error: EngineError | None = None
        self.loop = EngineLoop(
            make_engine(runner=runner),
            deliver=self.deliver,
            on_failure=self.fail,
            step_timeout_s=step_timeout_s,
        )
        self.loop.start()

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.tokens += output.token_ids
            if output.finish_reason is FinishReason.LENGTH:
                self.finished.set()

    def fail(self, error: EngineError) -> None:
        self.error = error
        self.failed.set()

    def submit(self, prompt: list[int], count: int) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        request = Request(request_id="r", prompt_ids=prompt, sampling=sampling)
        self.loop.submit(lambda engine: engine.add(request))


class StuckRunner(FakeRunner):
    """Never comes back from a step until released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def begin(self, plan: StepPlan) -> None:
        self.release.wait(WAIT_S)
        super().begin(plan)


@pytest.fixture
def probe(runner: FakeRunner) -> Iterator[Probe]:
    probe = Probe(runner)
    yield probe
    probe.loop.close()


def test_outputs_of_a_request_are_delivered_in_order(probe: Probe) -> None:
    probe.submit([1, 2, 3], 6)

    assert probe.finished.wait(WAIT_S)
    assert probe.tokens == expected_output([1, 2, 3], 6)
    probe.loop.close()
    stats = probe.loop.stats()
    assert (stats.generated_tokens_total, stats.num_held_pages) == (6, 0)


def test_an_exception_in_a_step_is_reported_once_and_ends_the_loop(
    probe: Probe, runner: FakeRunner
) -> None:
    runner.error = RuntimeError("device lost")
    probe.submit([1, 2, 3], 6)

    assert probe.failed.wait(WAIT_S)
    assert "device lost" in str(probe.error)
    assert isinstance(probe.loop.failure, EngineError)


def test_a_hung_step_is_reported_by_the_watchdog() -> None:
    runner = StuckRunner()
    probe = Probe(runner, step_timeout_s=0.1)
    probe.submit([1], 2)

    assert probe.failed.wait(WAIT_S)
    assert isinstance(probe.error, StepTimeout)
    assert "step_timeout_s" in str(probe.error)
    runner.release.set()
    probe.loop.close()


def test_what_others_see_fail_ends_an_idle_loop_at_once(probe: Probe) -> None:
    probe.loop.fail(EngineError("rank 1 is gone"))
    probe.loop.fail(EngineError("rank 2 is gone"))

    assert str(probe.error) == "rank 1 is gone"
    probe.loop.close(WAIT_S)
    assert str(probe.loop.failure) == "rank 1 is gone"


def test_closing_reports_to_those_still_waiting(probe: Probe) -> None:
    probe.loop.close()

    assert probe.failed.is_set()
    assert probe.tokens == []


def test_an_engine_is_stepped_in_the_thread_that_built_it() -> None:
    threads: list[threading.Thread] = []
    thread = EngineThread()
    thread.start()

    def build() -> Engine:
        threads.append(threading.current_thread())
        return make_engine()

    loop = EngineLoop(
        thread.call(build).result(WAIT_S),
        deliver=lambda outputs: None,
        on_failure=lambda error: None,
        step_timeout_s=30.0,
        on_start=lambda: threads.append(threading.current_thread()),
        thread=thread,
    )
    loop.start()
    loop.close()

    assert threads == [thread, thread]
    assert not thread.is_alive()


def test_an_engine_that_cannot_be_built_ends_its_thread() -> None:
    thread = EngineThread()
    thread.start()

    def build() -> Engine:
        raise ConfigError("no such model")

    future = thread.call(build)
    thread.end_with()

    with pytest.raises(ConfigError, match="no such model"):
        future.result(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()
