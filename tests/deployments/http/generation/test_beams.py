"""Beam search in every API that offers it: what the engine is asked, and scores in answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from remora.engine.beams.params import BeamParams
from remora.engine.types import Output, Request
from tests.deployments.fakes import FakeEngine, FakeServer, make_config
from tests.deployments.http.streams import ask, events

CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = "/v1/completions", {"prompt": "Hi"}


def native(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"text": "Hi", "sampling_params": fields}


def light(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"inputs": "Hi", "parameters": fields}


def server_for(body: dict[str, Any], **parts: Any) -> FakeServer:
    """Return a server of the dialect that a body is in."""
    dialect = "lightllm" if "inputs" in body else "auto"
    return FakeServer(config=make_config(generate_dialect=dialect), **parts)


class SearchingEngine(FakeEngine):
    """Gives each output a score, and all at the end."""

    def _outputs(self, request: Request) -> list[Output]:
        ends = [each for each in super()._outputs(request) if each.finish_reason is not None]
        return [replace(each, score=-0.5 - each.index) for each in ends]


ASKED: list[tuple[tuple[str, dict[str, Any]], dict[str, Any], BeamParams, int]] = [
    (TEXT, {"use_beam_search": True, "n": 3}, BeamParams(width=3), 3),
    (TEXT, {"use_beam_search": True, "n": 2, "best_of": 4}, BeamParams(width=4), 2),
    (CHAT, {"use_beam_search": True, "n": 2, "best_of": 4}, BeamParams(width=4), 2),
    (CHAT, {"num_beams": 5}, BeamParams(width=5), 1),
    (
        CHAT,
        {"num_beams": 4, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0.0},
        BeamParams(width=4, length_penalty=0.5, early_stopping="never"),
        1,
    ),
    (
        TEXT,
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.3, "early_stopping": True},
        BeamParams(width=4, num_groups=2, diversity_penalty=0.3, early_stopping=True),
        1,
    ),
    (native(num_beams=4, n=2), {}, BeamParams(width=4), 2),
    (light(do_beam=True, best_of=4, n=2), {}, BeamParams(width=4), 2),
    (light(do_beam_search=True, best_of=3), {}, BeamParams(width=3), 1),
    (light(use_beam_search=True, num_beams=3, do_sample=True), {}, BeamParams(width=3), 1),
]


@pytest.mark.parametrize(("where", "fields", "beams", "n"), ASKED, ids=str)
async def test_the_engine_is_asked_for_beams(
    where: tuple[str, dict[str, Any]], fields: dict[str, Any], beams: BeamParams, n: int
) -> None:
    # What the model's authors recommend for drawing tokens does not apply.
    path, body = where
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    server = server_for(body, generation_defaults=recommended)

    response = await ask(path, server, **body, **fields)

    assert response.status_code == 200, response.text
    (request,) = server.client.requests
    assert (request.sampling.beams, request.sampling.n) == (beams, n)


@pytest.mark.parametrize(
    ("where", "fields", "param"),
    [
        (TEXT, {"use_beam_search": False, "num_beams": 4}, "num_beams"),
        (TEXT, {"length_penalty": 0.5}, "length_penalty"),
        (CHAT, {"early_stopping": True}, "early_stopping"),
        (CHAT, {"num_beams": 2, "n": 3}, "n"),
        (CHAT, {"num_beams": 99}, "num_beams"),
        (CHAT, {"num_beams": 4, "num_beam_groups": 3}, "num_beam_groups"),
        (CHAT, {"num_beams": 4, "temperature": 0.7}, "temperature"),
        (TEXT, {"num_beams": 4, "min_p": 0.1}, "min_p"),
        (native(num_beams=2, top_k=5), {}, "sampling_params.top_k"),
        (light(length_penalty=2.0), {}, "parameters.length_penalty"),
    ],
    ids=str,
)
async def test_what_does_not_go_together_is_refused_by_its_name(
    where: tuple[str, dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    path, body = where
    server = server_for(body)

    response = await ask(path, server, **body, **fields)

    assert response.status_code == 400, response.text
    assert param in response.text
    assert not server.client.requests


@pytest.mark.parametrize("where", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_scores_best_first(
    where: tuple[str, dict[str, Any]], stream: bool
) -> None:
    path, body = where
    server = FakeServer(SearchingEngine())

    response = await ask(path, server, **body, num_beams=4, n=2, stream=stream)

    if stream:
        ends = [
            choice
            for event in events(response)
            for choice in event["choices"]
            if choice["finish_reason"] is not None
        ]
        assert [each["beam_score"] for each in ends] == [-0.5, -1.5]
    else:
        choices = response.json()["choices"]
        assert [each["beam_score"] for each in choices] == [-0.5, -1.5]


@pytest.mark.parametrize(
    ("where", "scores"),
    [
        (native(num_beams=2, n=2), lambda made: [one["meta_info"]["beam_score"] for one in made]),
        (light(do_beam=True, best_of=2, n=2), lambda made: made["beam_score"]),
    ],
    ids=["sglang", "lightllm"],
)
async def test_native_answers_have_scores(
    where: tuple[str, dict[str, Any]], scores: Callable[[Any], list[float]]
) -> None:
    path, body = where

    response = await ask(path, server_for(body, client=SearchingEngine()), **body)

    assert scores(response.json()) == [-0.5, -1.5]


@pytest.mark.parametrize(
    ("where", "fields"),
    [
        (TEXT, {"num_beams": 2, "stop": "x"}),
        (CHAT, {"num_beams": 2, "stop": ["x"]}),
        (native(num_beams=2, stop=["x"]), {}),
        (light(do_beam=True, best_of=2, stop_sequences=["x"]), {}),
    ],
    ids=str,
)
async def test_stop_texts_reach_a_search(
    where: tuple[str, dict[str, Any]], fields: dict[str, Any]
) -> None:
    path, body = where
    server = server_for(body)

    response = await ask(path, server, **body, **fields)

    assert response.status_code == 200, response.text
    (request,) = server.client.requests
    assert request.sampling.beams == BeamParams(width=2)
    assert request.sampling.stop == ("x",)


async def test_answers_without_beams_have_no_score() -> None:
    path, body = TEXT
    response = await ask(path, FakeServer(), **body)

    assert "beam_score" not in response.text
