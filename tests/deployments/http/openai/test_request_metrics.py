"""The times of a request and its drafts in answers: `api.request_metrics`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from remora.deployments.http.generation.replies import Replies
from remora.deployments.observing.reply_clock import ReplyClock
from remora.engine.spec.counts import DraftCounts
from remora.engine.types import FinishReason, Output, Request
from tests.deployments.fakes import FakeEngine, FakeServer, make_config
from tests.deployments.http.streams import ask, events

CLOCK = "remora.deployments.observing.reply_clock"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "a"},
}
DRAFTS = DraftCounts(num_rows=2, num_drafts=5, num_accepted=3)


class Waiting(FakeEngine):
    """An engine whose sequences waited for 8 ms and then took three steps."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        for index in range(request.sampling.n):
            for step in range(3):
                yield Output(
                    index=index,
                    token_ids=(97,),
                    text="a",
                    finish_reason=FinishReason.STOP if step == 2 else None,
                    num_output_tokens=step + 1,
                    queue_s=0.008,
                    drafts=DRAFTS,
                )


def server(*, is_on: bool = True) -> FakeServer:
    return FakeServer(Waiting(), config=make_config(request_metrics=is_on))


def check(metrics: dict[str, Any]) -> None:
    assert metrics["queue_time_ms"] == 8
    assert metrics["generation_time_ms"] > 0
    assert metrics["mean_itl_ms"] == metrics["generation_time_ms"] / 2
    spent_ms = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
    assert metrics["tokens_per_second"] == pytest.approx(3e3 / spent_ms)
    assert metrics["speculative_decoding"] == {
        "num_spec_steps": 2,
        "num_draft_tokens": 5,
        "num_accepted_draft_tokens": 3,
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.6,
    }


@pytest.mark.observes("api.request_metrics")
@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_has_its_times(path: str) -> None:
    check((await ask(path, server(), **BODIES[path])).json()["metrics"])
    assert "metrics" not in (await ask(path, server(is_on=False), **BODIES[path])).json()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_has_them_beside_its_usage(path: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}

    *chunks, last = events(await ask(path, server(), **BODIES[path], **options))
    without = events(await ask(path, server(), **BODIES[path], stream=True))

    check(last["metrics"])
    assert not any("metrics" in chunk for chunk in [*chunks, *without])


async def test_a_streamed_response_has_them_at_its_end() -> None:
    answer = await ask(RESPONSES, server(), **BODIES[RESPONSES], stream=True)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    *earlier, last = (json.loads(line.removeprefix("data: ")) for line in lines)

    check(last["response"]["metrics"])
    assert not any("metrics" in event.get("response", {}) for event in earlier)


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"n": 2}), (COMPLETIONS, {"n": 2}), (COMPLETIONS, {"prompt": ["a", "b"]})],
)
async def test_several_outputs_have_no_times_of_their_own(
    path: str, fields: dict[str, Any]
) -> None:
    answer = (await ask(path, server(), **BODIES[path] | fields)).json()

    assert len(answer["choices"]) == 2
    assert answer["metrics"] is None


def test_times_are_those_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = iter((130, 150, 190))
    monkeypatch.setattr(f"{CLOCK}.time.monotonic_ns", lambda: next(now_ms) * 10**6)
    clock, replies = ReplyClock(started_ns=100 * 10**6), Replies()
    for step in range(3):
        output = Output(index=0, token_ids=(1,), text="", num_output_tokens=step + 1, queue_s=0.02)
        clock.note(output)
        replies.add(0, output)

    assert replies.metrics(clock) == {
        "time_to_first_token_ms": 10,
        "generation_time_ms": 60,
        "queue_time_ms": 20,
        "mean_itl_ms": 30,
        "tokens_per_second": pytest.approx(3e3 / 70),
    }


def test_a_request_without_output_has_no_rates() -> None:
    metrics = Replies().metrics(ReplyClock(started_ns=0))

    assert metrics is not None
    assert metrics["mean_itl_ms"] is None
    assert metrics["tokens_per_second"] is None
