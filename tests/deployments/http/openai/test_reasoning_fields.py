"""Reasoning: the request fields that control it, and the response fields that hold it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_config,
)
from tests.deployments.http.streams import ask

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
TEXT = "2 and 2</think>4"


def make_server(text: str = TEXT, *variables: str, **api: Any) -> FakeServer:
    return FakeServer(
        FakeEngine(text=text),
        tokenizer=CharTokenizer(*variables),
        config=make_config(**{"reasoning_parser": "deepseek-r1"} | api),
    )


async def post(server: FakeServer | None = None, **fields: Any) -> httpx.Response:
    return await ask(PATH, server or make_server(), **{"messages": HELLO} | fields)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("both", {"reasoning", "reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
    ],
)
@pytest.mark.observes("api.reasoning_field")
async def test_reasoning_has_the_names_that_the_operator_chose(field: str, names: set[str]) -> None:
    body = (await post(make_server(reasoning_field=field))).json()

    message = body["choices"][0]["message"]
    assert {name for name in message if name.startswith("reasoning")} == names
    assert {message[name] for name in names} == {"2 and 2"}
    assert message["content"] == "4"


async def test_the_engine_is_told_of_the_reasoning_and_of_its_budget() -> None:
    server = make_server()

    await post(server)
    await post(server, thinking_token_budget=7)

    budgets = [r.reasoning.budget for r in server.client.requests if r.reasoning is not None]
    assert budgets == [None, 7]


async def test_a_budget_opens_reasoning_that_the_model_would_open_itself() -> None:
    server = make_server(reasoning_parser="qwen3")

    await post(server)
    await post(server, thinking_token_budget=7)
    await post(server, regex="a")

    free, limited, held = server.client.requests
    assert free.reasoning is None
    for request in (limited, held):
        assert request.reasoning is not None
        assert "".join(map(chr, request.prompt_ids)).endswith("<|assistant|><think>\n")


@pytest.mark.observes("api.reasoning_parser")
async def test_a_budget_for_a_model_without_reasoning_is_refused() -> None:
    error = (await post(make_server(reasoning_parser="none"), thinking_token_budget=7)).json()

    assert error["error"]["param"] == "thinking_token_budget"


@pytest.mark.parametrize(
    ("variables", "effort", "expected"),
    [
        (("reasoning_effort",), "low", {"reasoning_effort": "low"}),
        (("enable_thinking",), "none", {"enable_thinking": False}),
        (("enable_thinking",), "high", {"enable_thinking": True}),
        (("thinking",), "none", {"thinking": False}),
        (
            ("reasoning_effort", "thinking"),
            "max",
            {"reasoning_effort": "max", "thinking": True},
        ),
        ((), "none", {}),
    ],
)
async def test_an_effort_is_told_in_the_templates_words(
    variables: tuple[str, ...], effort: str, expected: dict[str, Any]
) -> None:
    server = make_server("4", *variables, reasoning_parser="none")

    response = await post(server, reasoning_effort=effort)

    assert response.status_code == 200, response.text
    rendered = server.tokenizer.rendered[0]
    assert {k: v for k, v in rendered.items() if k not in ("messages", "tools", "documents")} == (
        expected
    )


async def test_an_effort_that_would_change_nothing_is_refused() -> None:
    switched_on = {"chat_template_kwargs": {"enable_thinking": True}}
    without = await post(reasoning_effort="none")
    against = await post(
        make_server(TEXT, "enable_thinking"), reasoning_effort="none", **switched_on
    )

    for response in (without, against):
        assert response.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"enable_thinking": False, "custom": 1}),
        ({"chat_template_kwargs": {"custom": 2}}, {"enable_thinking": False, "custom": 2}),
        ({"reasoning_effort": "high"}, {"enable_thinking": True, "custom": 1}),
    ],
)
@pytest.mark.observes("api.template_variables")
async def test_the_operator_s_variables_give_way_to_the_request_s(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    own = {"enable_thinking": False, "custom": 1}
    server = make_server("4", *own, reasoning_parser="none", template_variables=own)

    response = await post(server, **fields)

    assert response.status_code == 200, response.text
    rendered = server.tokenizer.rendered[0]
    assert {name: rendered[name] for name in own} == expected


@pytest.mark.observes("api.reasoning_efforts")
@pytest.mark.parametrize(("asked", "rendered"), [("minimal", "low"), ("high", "high")])
async def test_efforts_may_have_other_names_in_the_template(asked: str, rendered: str) -> None:
    server = make_server(
        "4", "reasoning_effort", reasoning_parser="none", reasoning_efforts={"minimal": "low"}
    )

    response = await post(server, reasoning_effort=asked)

    assert response.status_code == 200, response.text
    assert server.tokenizer.rendered[0]["reasoning_effort"] == rendered
