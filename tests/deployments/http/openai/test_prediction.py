"""Predicted outputs and limits of drafts in requests, and what the server says of drafts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from remora.configs.planning.speculation_plan import SpeculationPlan
from remora.engine.spec.counts import DraftCounts
from remora.engine.types import EngineStats, Output, Request
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_plan
from tests.deployments.http.streams import ask

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
NGRAM = SpeculationPlan(method="ngram", max_drafts=4, shortest=2, longest=5, max_bytes=2**20)


class DraftingEngine(FakeEngine):
    """An engine of whose predicted tokens 3 became output and 2 did not."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        async for output in super().generate(request):
            is_predicted = output.finish_reason is not None and bool(request.prediction_ids)
            yield replace(output, predicted=(3, 2)) if is_predicted else output

    def stats(self) -> EngineStats:
        return replace(
            super().stats(),
            draft_tokens_total=20,
            accepted_drafts_total=15,
            drafted_rows_total=5,
            drafts_by_source=(
                ("prediction", DraftCounts(1, 4, 3)),
                ("ngram", DraftCounts(4, 16, 12)),
            ),
            draft_time_total_s=0.5,
            verify_steps_total=3,
            verify_time_total_s=0.25,
            tried_drafts=(5, 5, 5, 4),
            right_drafts=(5, 5, 4, 1),
        )


def drafting() -> FakeServer:
    return FakeServer(DraftingEngine(), plan=make_plan(speculation=NGRAM))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": part} for part in "abc"]])
async def test_a_prediction_reaches_the_engine_and_is_accounted_for(
    content: Any, stream: bool
) -> None:
    server = drafting()
    prediction = {"type": "content", "content": content}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    response = await ask(CHAT, server, messages=HELLO, prediction=prediction, **options)

    assert response.status_code == 200
    (request,) = server.client.requests
    assert list(request.prediction_ids) == server.tokenizer.encode("abc", add_special_tokens=False)
    assert '"accepted_prediction_tokens":3' in response.text.replace(" ", "")
    assert '"rejected_prediction_tokens":2' in response.text.replace(" ", "")
    assert '"completion_tokens":6' in response.text.replace(" ", "")


async def test_without_speculation_a_prediction_is_a_hint_without_effect() -> None:
    server = FakeServer()
    prediction = {"type": "content", "content": "abc"}

    response = await ask(CHAT, server, messages=HELLO, prediction=prediction)

    assert response.status_code == 200
    assert list(server.client.requests[0].prediction_ids) == []
    assert "accepted_prediction_tokens" not in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "prediction": "abc"}),
        (CHAT, {"messages": HELLO, "prediction": {"type": "text", "content": "abc"}}),
        (CHAT, {"messages": HELLO, "prediction": {"type": "content", "content": [{"text": 3}]}}),
        ("/v1/completions", {"prompt": "x", "prediction": {"type": "content", "content": "abc"}}),
    ],
)
async def test_other_predictions_are_refused_by_name(path: str, body: dict[str, Any]) -> None:
    response = await ask(path, drafting(), **body)

    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_drafts": 0}),
        ("/v1/completions", {"prompt": "x", "max_drafts": 0}),
        ("/v1/responses", {"input": "x", "max_drafts": 0}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4, "max_drafts": 0}),
        ("/generate", {"text": "x", "sampling_params": {"max_drafts": 0}}),
    ],
)
async def test_requests_may_limit_their_drafts(path: str, body: dict[str, Any]) -> None:
    server = drafting()

    response = await ask(path, server, **body)

    assert response.status_code == 200
    assert server.client.requests[0].sampling.max_drafts == 0


async def test_operators_see_drafts() -> None:
    async with make_client(drafting()) as client:
        info = (await client.get("/server_info")).json()["speculation"]
        metrics = (await client.get("/metrics")).text

    assert info == {
        "method": "ngram",
        "max_drafts": 4,
        "adaptive": True,
        "verified_rows": 5,
        "draft_tokens": 20,
        "accepted_drafts": 15,
        "acceptance_rate": 0.75,
        "tokens_per_verified_row": 4.0,
        "sources": {
            "prediction": {
                "verified_rows": 1,
                "draft_tokens": 4,
                "accepted_drafts": 3,
                "acceptance_rate": 0.75,
                "tokens_per_verified_row": 4.0,
            },
            "ngram": {
                "verified_rows": 4,
                "draft_tokens": 16,
                "accepted_drafts": 12,
                "acceptance_rate": 0.75,
                "tokens_per_verified_row": 4.0,
            },
        },
        "tried_by_position": [5, 5, 5, 4],
        "right_by_position": [5, 5, 4, 1],
        "draft_time_s": 0.5,
        "verify_steps": 3,
        "verify_time_s": 0.25,
    }
    for line in (
        'remora_draft_tokens_total{model_name="tiny",source="prediction"} 4.0',
        'remora_draft_tokens_total{model_name="tiny",source="ngram"} 16.0',
        'remora_accepted_drafts_total{model_name="tiny",source="ngram"} 12.0',
        'remora_drafted_rows_total{model_name="tiny",source="prediction"} 1.0',
        'remora_verify_steps_total{model_name="tiny"} 3.0',
        'remora_verify_time_seconds_total{model_name="tiny"} 0.25',
        'remora_draft_time_seconds_total{model_name="tiny"} 0.5',
        'remora_verified_drafts_by_position_total{model_name="tiny",position="4"} 4.0',
        'remora_right_drafts_by_position_total{model_name="tiny",position="3"} 4.0',
    ):
        assert line in metrics
