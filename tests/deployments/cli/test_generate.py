"""`remora generate`, over HTTP and offline with a fake engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from remora.deployments.cli.main import app
from remora.engine.types import SamplingParams
from tests.deployments.cli.fake_server import STOP, FakeServer, text_event

MakeServer = Callable[..., FakeServer]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the engine with a fake that records its arguments."""
    asked: dict[str, Any] = {}

    class FakeLLM:
        def __init__(self, model: str) -> None:
            asked["model"] = model

        def generate(self, prompts: list[str], params: SamplingParams) -> list[SimpleNamespace]:
            asked.update(prompts=prompts, params=params)
            return [SimpleNamespace(text=" Paris.")]

    module = ModuleType("remora.engine.llm")
    vars(module).update(LLM=FakeLLM, SamplingParams=SamplingParams)
    monkeypatch.setitem(sys.modules, "remora.engine.llm", module)
    return asked


@pytest.mark.parametrize(
    ("flags", "model", "params"),
    [
        ("", "smollm2-135m-instruct", SamplingParams(max_tokens=128, temperature=0.0)),
        (
            "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --seed 7 "
            "--repetition-penalty 1.1 --stop a --stop b --model some/folder",
            "some/folder",
            SamplingParams(
                max_tokens=5,
                temperature=0.5,
                top_p=0.9,
                top_k=3,
                min_p=0.1,
                seed=7,
                repetition_penalty=1.1,
                stop=("a", "b"),
            ),
        ),
    ],
)
def test_offline_flags_become_sampling_parameters(
    offline: dict[str, Any], flags: str, model: str, params: SamplingParams
) -> None:
    prompt = "The capital of France is"

    result = CliRunner().invoke(app, ["generate", prompt, *flags.split()])

    assert result.stdout == " Paris.\n"
    assert offline == {"model": model, "prompts": [prompt], "params": params}


def test_a_wrong_flag_is_refused_before_a_model_loads(offline: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--top-p", "2"])

    assert result.exit_code == 2
    assert "top_p is 2.0" in result.stderr
    assert "model" not in offline


def test_a_dash_reads_the_prompt_from_stdin_which_must_not_be_empty(
    offline: dict[str, Any],
) -> None:
    assert CliRunner().invoke(app, ["generate", "-"], input="").exit_code == 2
    assert offline == {}

    CliRunner().invoke(app, ["generate", "-"], input="two\nlines\n")

    assert offline["prompts"] == ["two\nlines\n"]


def test_over_http_the_text_is_streamed(make_server: MakeServer) -> None:
    server = make_server((200, text_event(" Par") + text_event("is.") + STOP))

    result = CliRunner().invoke(
        app, ["generate", "The capital", "--url", server.url, "--max-tokens", "9", "--stop", "!"]
    )

    assert result.stdout == " Paris.\n"
    assert server.posts == [
        {
            "path": "/v1/completions",
            "prompt": "The capital",
            "model": "tiny",
            "max_tokens": 9,
            "temperature": 0.0,
            "stop": ["!"],
            "stream": True,
        }
    ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((429, '{"error": {"message": "queue is full"}}'), "queue is full (HTTP 429)"),
        ((500, "<html>"), "HTTP 500"),
        ((200, text_event("x")), "[DONE]"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(
    make_server: MakeServer, answer: tuple[int, str], expected: str
) -> None:
    server = make_server(answer)

    result = CliRunner().invoke(app, ["generate", "x", "--url", server.url])

    assert result.exit_code == 2
    assert expected in result.stderr
    assert "Traceback" not in result.output
