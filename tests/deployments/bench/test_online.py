"""What is sent to servers of several dialects, and how their tokens are counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from remora.deployments.bench.http_client import Reply, parse_url
from remora.deployments.bench.online import Server, measure, trace_of
from remora.deployments.bench.report.record import Result
from remora.deployments.bench.workloads import OFFLINE, Workload, online
from remora.deployments.cli.terminal import Failure
from tests.deployments.bench.openai_server import Answer, FakeOpenAI, by_rule, completion_events

MakeOpenAI = Callable[..., FakeOpenAI]
SMALL = online(3).resized(requests=7, inputs=12, outputs=6)


def refuse(reason: str) -> Answer:
    return 400, "application/json", f'{{"error": {{"message": "{reason}"}}}}'.encode()


def overriding(path: str, answer: Answer) -> Callable[[str, dict[str, Any]], Answer]:
    """Return the rule of a server that gives `answer` at one path."""
    return lambda asked, body: answer if asked == path else by_rule(asked, body)


def run(server: FakeOpenAI, workload: Workload, *, repeats: int = 1) -> Result:
    async def go() -> Result:
        return await measure(
            await Server.open(parse_url(server.url), None), workload, repeats=repeats
        )

    return asyncio.run(go())


def sent(server: FakeOpenAI, workload: Workload) -> list[dict[str, Any]]:
    """Return the bodies of the run itself, without probes and warm-up."""
    return [body for _, body in server.received][-workload.num_requests :]


def test_every_request_is_sent_and_counted(make_openai: MakeOpenAI) -> None:
    server = make_openai()

    result = run(server, SMALL, repeats=2)

    assert result.spread["requests"] == (7.0, 7.0)
    assert result.figures["failures"] == 0
    bodies = [body for _, body in server.received][-14:]
    assert all(len(body["prompt"]) == 12 and body["ignore_eos"] for body in bodies)
    assert {body["min_tokens"] for body in bodies} == {6}
    assert {body["model"] for body in bodies} == {"tiny"}
    assert len({str(body["prompt"]) for body in bodies}) == 14


@pytest.mark.parametrize("takes_ids", [True, False])
def test_what_a_server_refuses_is_not_sent(make_openai: MakeOpenAI, takes_ids: bool) -> None:
    def strict(path: str, body: dict[str, Any]) -> Answer:
        if isinstance(body.get("prompt"), list) and not takes_ids:
            return refuse("prompt must be a string")
        return refuse("unknown field") if "ignore_eos" in body else by_rule(path, body)

    server = make_openai(answer=strict)

    result = run(server, SMALL)

    bodies = sent(server, SMALL)
    prompt = bodies[0]["prompt"]
    assert len(prompt if takes_ids else prompt.split()) == 12
    assert all("ignore_eos" not in body for body in bodies)
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
    assert "the server refuses ignore_eos: replies may end early" in result.notes
    assert ("prompt must be a string" in result.notes[0]) is not takes_ids


def test_a_server_that_refuses_everything_is_a_failure(make_openai: MakeOpenAI) -> None:
    closed = overriding("/v1/completions", refuse("closed"))

    with pytest.raises(Failure, match="refuses completions: HTTP 400: closed"):
        run(make_openai(answer=closed), SMALL)


@pytest.mark.parametrize("name", ["embedding", "json-schema"])
def test_an_unsupported_endpoint_is_skipped_with_its_reason(
    make_openai: MakeOpenAI, name: str
) -> None:
    server = make_openai()

    result = run(server, OFFLINE[name].resized(requests=2))

    assert result.skipped == "HTTP 404: no such path"
    assert result.figures == {}


def test_embeddings_are_really_asked_for(make_openai: MakeOpenAI) -> None:
    answer = (200, "application/json", b'{"data": [], "usage": {"prompt_tokens": 5}}')
    workload = OFFLINE["embedding"].resized(requests=3, inputs=5)

    result = run(make_openai(answer=overriding("/v1/embeddings", answer)), workload)

    assert result.figures["failures"] == 0
    assert result.figures["total_tok_s"] * result.figures["seconds"] == pytest.approx(15)


def test_a_schema_is_really_sent(make_openai: MakeOpenAI) -> None:
    answer = (200, "text/event-stream", completion_events(3))
    server = make_openai(answer=overriding("/v1/chat/completions", answer))
    workload = OFFLINE["json-schema"].resized(requests=2)

    result = run(server, workload)

    assert result.figures["failures"] == 0
    body = sent(server, workload)[0]
    assert body["response_format"]["json_schema"]["schema"]["required"]
    assert "ignore_eos" not in body


def test_a_workload_whose_requests_all_fail_is_skipped(make_openai: MakeOpenAI) -> None:
    def tired(path: str, body: dict[str, Any]) -> Answer:
        return refuse("too long") if body.get("max_tokens", 0) > 8 else by_rule(path, body)

    result = run(make_openai(answer=tired), SMALL.resized(outputs=9))

    assert result.skipped == "every request failed: HTTP 400: too long"


def test_token_counts_come_from_the_server_or_the_finish_reason() -> None:
    counted = Reply(status=200, is_stream=True, stamps_s=[1.0], usage={"completion_tokens": 3})
    known = Reply(status=200, is_stream=True, stamps_s=[1.0, 2.0], finish_reason="length")
    unknown = Reply(status=200, is_stream=True, stamps_s=[1.0, 2.0], finish_reason="stop")

    traces = [trace_of(reply, 0.0, SMALL) for reply in (counted, known, unknown)]

    assert [trace.num_output_tokens for trace in traces[:2]] == [3, 6]
    assert traces[2].error is not None


def test_pieces_of_several_tokens_are_noted(make_openai: MakeOpenAI) -> None:
    events = completion_events(2).replace(b'"completion_tokens": 2', b'"completion_tokens": 6')
    merged = overriding("/v1/completions", (200, "text/event-stream", events))

    result = run(make_openai(answer=merged), SMALL)

    assert "3.0 tokens per streamed piece: itl is between pieces" in result.notes


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_drafts_of_a_run_are_what_the_server_counted_meanwhile(
    make_openai: MakeOpenAI, num_replicas: int
) -> None:
    asked = 0

    def answer(path: str, body: dict[str, Any]) -> Answer:
        nonlocal asked
        if path != "/server_info":
            return by_rule(path, body)
        asked += 1
        speculation = {
            "verified_rows": 10 * asked,
            "draft_tokens": 40 * asked,
            "accepted_drafts": 25 * asked,
            "verify_steps": 5 * asked,
            "tried_by_position": [10 * asked, 8 * asked, 0],
            "right_by_position": [8 * asked, 2 * asked, 0],
            "draft_time_s": 0.25 * asked,
            "verify_time_s": 0.5 * asked,
        }
        info = {
            "speculation": speculation,
            "config": {"parallel": {"num_replicas": num_replicas}},
        }
        return 200, "application/json", json.dumps(info).encode()

    result = run(make_openai(answer=answer), SMALL)

    if num_replicas > 1:  # each counts its own, and any of them may answer
        assert "draft_rows" not in result.figures
        return
    expected = {
        "draft_rows": 10,
        "draft_tokens": 40,
        "verify_steps": 5,
        "tokens_per_verified_row": 3.5,
        "accepted_share": 0.625,
        "accepted_1_share": 0.8,
        "accepted_2_share": 0.25,
        "drafting_s": 0.25,
        "verifying_s": 0.5,
    }
    assert {name: result.figures[name] for name in expected} == expected
    assert "accepted_3_share" not in result.figures
