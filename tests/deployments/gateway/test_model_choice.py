"""The model of a request, and the error where it is ambiguous."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import InvalidRequest, UnknownModel
from remora.deployments.gateway.model_choice import choose_model, wants_stream
from remora.deployments.http.core.wire_formats import (
    OLLAMA,
    OPENAI,
    RTP_LLM,
    TGI,
    Dialect,
)

NAMES = ("big", "small")


@pytest.mark.parametrize(
    ("path", "query", "body", "name"),
    [
        ("/v1/chat/completions", "", {"model": "small"}, "small"),
        ("/v1/chat/completions", "model=big", {"model": "small"}, "small"),
        ("/v1/chat/completions", "", {"model": "big:adapter"}, "big"),
        ("/api/show", "", {"name": "small"}, "small"),
        ("/v1/models/small", "", None, "small"),
        ("/model_info", "a=b&model=small", None, "small"),
        ("/v1/chat/completions", "", {"model": 5}, "big"),
        ("/openapi.json", "", None, "big"),
        ("/v1/responses/resp_1", "", None, "big"),
    ],
)
def test_the_model_is_told_by_body_path_or_query(
    path: str, query: str, body: Any, name: str
) -> None:
    assert choose_model(NAMES, path, query, body) == name


@pytest.mark.parametrize("names", [("llama", "llama:70b"), ("llama:70b", "llama")])
@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("llama", "llama"),
        ("llama:70b", "llama:70b"),
        ("llama:70b:adapter", "llama:70b"),
        ("llama:70bb", "llama"),
        ("llama:latest", "llama"),
    ],
)
def test_a_name_that_begins_with_another_is_its_own(
    names: tuple[str, ...], asked: str, name: str
) -> None:
    assert choose_model(names, "/v1/completions", "", {"model": asked}) == name


@pytest.mark.parametrize("body", [{}, {"model": None}, [], None])
def test_a_request_that_names_no_model_is_told_which_there_are(body: Any) -> None:
    with pytest.raises(InvalidRequest, match="'big', 'small'") as caught:
        choose_model(NAMES, "/v1/completions", "", body)

    assert caught.value.param == "model"


@pytest.mark.parametrize("name", ["huge", "", "bigger", "small/er", "BIG"])
def test_an_unknown_model_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(UnknownModel, match="serves 'big', 'small'"):
        choose_model(NAMES, "/v1/completions", "", {"model": name})


@pytest.mark.parametrize("body", [None, {}, {"model": "other"}, 5])
def test_one_model_alone_judges_everything_itself(body: Any) -> None:
    assert choose_model(("only",), "/v1/completions", "", body) == "only"


@pytest.mark.parametrize(
    ("path", "dialect", "body", "streams"),
    [
        ("/v1/completions", OPENAI, {"stream": True}, True),
        ("/v1/completions", OPENAI, {"stream": "yes"}, False),
        ("/v1/completions", OPENAI, {}, False),
        ("/generate_stream", TGI, {}, True),
        ("/api/chat", OLLAMA, {"stream": True}, False),
        ("/v1/completions", OPENAI, None, False),
        ("/", RTP_LLM, {"yield_generator": True}, True),
        ("/", RTP_LLM, {"generation_config": {"yield_generator": True}}, True),
        ("/", RTP_LLM, {"generate_config": [1], "yield_generator": 1}, False),
        ("/v1/completions", OPENAI, {"yield_generator": True}, False),
    ],
)
def test_comments_come_first_only_where_events_are_asked_for(
    path: str, dialect: Dialect, body: Any, streams: bool
) -> None:
    assert wants_stream(path, dialect, body) is streams
