"""Structured output end to end: HTTP, compiler, engine, sampler.

200 schemas of increasing difficulty on random weights, some of them on a trained model; greedy and
sampled, streamed and not, next to unconstrained requests. A reply with finish_reason `stop`
validates, an unsupported schema is a 400, and unconstrained requests do not change.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conftest import NUM_THREADS, TinyCheckpoints
from tests.deployments.pooling_replica import running
from tests.engine.grammar.schemas import SCHEMAS

RUNS = [
    ("random", "xgrammar"),
    ("random", "outlines"),
    ("smollm2", "xgrammar"),
    pytest.param("smollm2", "outlines", marks=pytest.mark.slow),
]
FREE = [f"Tell me about the number {number}." for number in range(4)]
CONCURRENT = 32
WAYS = [(0.0, False), (1.0, True), (0.0, True), (1.0, False)]  # temperature, streamed


@dataclass(frozen=True)
class Answer:
    """The result of one request. `text`: None = refused."""

    text: str | None
    finish_reason: str | None


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code == 400:
        return Answer(None, response.json()["error"]["code"])
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        choice = response.json()["choices"][0]
        return Answer(choice["message"]["content"] or "", choice["finish_reason"])
    events = response.text.split("\n\n")
    chunks = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    assert not [chunk for chunk in chunks if "error" in chunk], chunks[-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return Answer(text, choices[-1]["finish_reason"])


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def free_body(prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": 48, "temperature": 0, "ignore_eos": True}


def constrained_body(schema: dict[str, Any], number: int, **fields: Any) -> dict[str, Any]:
    content = f"Answer with JSON. Example number {number}."
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 160,
        "seed": number,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        **fields,
    }


def is_tried(model: str, backend: str, number: int, way: int) -> bool:
    """Whether a schema is asked for in a way.

    Each in one of the four ways, which no backend sees: on the fast model by xgrammar all, by
    outlines every third; on the slow model every twentieth.
    """
    share = 20 if model != "random" else 1 if backend == "xgrammar" else 3
    return number % share == 0 and way == number // share % len(WAYS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "backend"), RUNS)
async def test_finished_replies_validate_and_unconstrained_requests_are_unchanged(
    model: str, backend: str, smollm2_path: Path, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = smollm2_path if model == "smollm2" else tiny_checkpoints("llama")
    bodies = [
        (schema, constrained_body(schema, number, temperature=temperature, stream=stream))
        for number, schema in enumerate(SCHEMAS)
        for way, (temperature, stream) in enumerate(WAYS)
        if is_tried(model, backend, number, way)
    ]
    sections: dict[str, Any] = {
        "engine": {"kv_tokens": 16384, "num_threads": NUM_THREADS},
        "grammar": {"backend": backend, "compile_timeout_s": 20.0},
    }
    async with running(path, timeout_s=600, **sections) as (client, _):
        alone = [await ask(client, free_body(prompt)) for prompt in FREE]
        places = asyncio.Semaphore(CONCURRENT)

        async def in_turn(body: dict[str, Any]) -> Answer:
            async with places:
                return await ask(client, body)

        constrained = [asyncio.create_task(in_turn(body)) for _, body in bodies]
        repeats = 3 if model == "random" else 1
        crowded = [await ask(client, free_body(prompt)) for prompt in FREE for _ in range(repeats)]
        answers = await asyncio.gather(*constrained)

    assert crowded == [answer for answer in alone for _ in range(repeats)]
    for (schema, _), answer in zip(bodies, answers, strict=True):
        if answer.finish_reason == "stop":
            assert is_valid(answer.text or "", schema), (schema, answer.text)
    num_refused = sum(answer.text is None for answer in answers)
    num_stopped = sum(answer.finish_reason == "stop" for answer in answers)
    assert num_refused <= len(answers) * (0 if backend == "xgrammar" else 0.2)
    assert num_stopped > (len(answers) - num_refused) * 0.8
