"""The table of limits, row by row: what is at a limit is taken, one more is refused.

Each refusal has its status, a message with what was found and what is allowed, and is counted; the
operator's value, where there is a key, counts instead of the default.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from remora.configs.sections.grammar import GrammarSection
from remora.configs.sections.limits import LimitsSection
from remora.engine.grammar.constraint import Constraint
from remora.engine.grammar.prepare import Source
from remora.engine.grammar.service import GrammarService
from remora.engine.types import Grammar
from tests.deployments.fakes import (
    EOS,
    MODEL,
    CharTokenizer,
    FakeEngine,
    FakeGrammar,
    FakeServer,
    make_client,
    make_plan,
    make_server_config,
)

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
TGI, LIGHT, TOKENIZE = "/generate_stream", "/generate", "/tokenize"
JSON = {"content-type": "application/json"}


class Grammars(GrammarService):
    """The service without its compiler: whatever passes its checks is a grammar."""

    def _grammar(self, source: Source) -> Future[Grammar]:
        done: Future[Grammar] = Future()
        done.set_result(FakeGrammar(Constraint(kind="json_schema", source=source.text)))  # type: ignore[arg-type]
        return done


def make_server(**sections: Any) -> FakeServer:
    """A server that would take far more than the limits do."""
    config = make_server_config(**{"api": {"tool_parser": "hermes"}, **sections})
    plan = make_plan(max_model_len=10**7, num_pages=10**6, max_running_requests=4096)
    grammars = Grammars(config.grammar, CharTokenizer(), vocab_size=257, eos_token_ids=(EOS,))  # type: ignore[arg-type]
    return FakeServer(FakeEngine(text="A"), plan=plan, config=config, grammars=grammars)  # type: ignore[arg-type]


def of(path: str, **fields: Any) -> dict[str, Any]:
    """A body that a path takes, with some fields."""
    turn = [{"role": "user", "content": "Hi"}]
    usual: dict[str, dict[str, Any]] = {
        CHAT: {"messages": turn, "max_tokens": 1},
        COMPLETIONS: {"prompt": "a", "max_tokens": 1},
        RESPONSES: {"input": "Hi"},
        MESSAGES: {"messages": turn, "max_tokens": 1},
        OLLAMA: {"model": MODEL, "messages": turn, "stream": False},
        GENERATE: {} if "inputs" in fields else {"text": "a"},
        TGI: {"inputs": "a"},
        TOKENIZE: {} if "messages" in fields else {"prompt": "a"},
        "/detokenize": {},
        "/v1/messages/count_tokens": {"messages": turn},
    }
    return usual[path] | fields


def turns(num: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "a"}] * num


def tools(num: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(num)]


def named(num: int) -> list[dict[str, Any]]:
    return [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(num)]


def functions(num: int) -> list[dict[str, Any]]:
    return [{"type": "function", "name": f"f{i}"} for i in range(num)]


def nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` objects one in the other."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def padded(num_bytes: int) -> str:
    text = '{"type": "string", "title": ""}'
    return text.replace('""', f'"{"x" * (num_bytes - len(text))}"')


def extra(literal: Callable[[int], str]) -> Callable[[int], str]:
    return lambda num: f'{{"prompt": "a", "max_tokens": 1, "extra": {literal(num)}}}'


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table at one path.

    limit:  key of the configuration, and the counter's label
    make:   the body with so much of it: an object, or JSON text
    says:   what a message tells beside the limit, given one more than is allowed
    """

    limit: str
    path: str
    make: Callable[[int], Any]
    param: str | None = None
    default: int | None = None
    says: str = "{}"
    config: dict[str, Any] | None = None

    @property
    def at(self) -> int:
        sections = (LimitsSection(), GrammarSection())
        if self.default is not None:
            return self.default
        return int(next(getattr(s, self.limit) for s in sections if hasattr(s, self.limit)))

    def __str__(self) -> str:
        return f"{self.limit}-{self.path.rpartition('/')[2]}-{self.param}"


FORMAT = "response_format"


def schema(source: Any) -> dict[str, Any]:
    return of(CHAT, response_format={"type": "json_schema", "json_schema": {"schema": source}})


ROWS = [
    # JSON itself
    Row("max_json_depth", COMPLETIONS, extra(lambda n: "[" * (n - 1) + "]" * (n - 1)), says=""),
    Row(
        "max_json_depth",
        COMPLETIONS,
        extra(lambda n: '{"a":' * (n - 1) + "1" + "}" * (n - 1)),
        says="",
    ),
    Row("max_json_digits", COMPLETIONS, extra(lambda n: "9" * n), says=""),
    Row("max_json_digits", COMPLETIONS, extra(lambda n: "-" + "9" * n), says=""),
    # counts of things in a body
    Row("max_messages", CHAT, lambda n: of(CHAT, messages=turns(n)), "messages"),
    Row("max_messages", RESPONSES, lambda n: of(RESPONSES, input=turns(n)), "input"),
    Row("max_messages", MESSAGES, lambda n: of(MESSAGES, messages=turns(n)), "messages"),
    Row("max_messages", OLLAMA, lambda n: of(OLLAMA, messages=turns(n)), "messages"),
    Row("max_messages", TOKENIZE, lambda n: of(TOKENIZE, messages=turns(n)), "messages"),
    Row(
        "max_parts",
        CHAT,
        lambda n: of(
            CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * n}]
        ),
        "messages[0].content",
    ),
    Row(
        "max_parts",
        RESPONSES,
        lambda n: of(
            RESPONSES,
            input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}] * n}],
        ),
        "input[0].content",
    ),
    Row(
        "max_parts",
        MESSAGES,
        lambda n: of(
            MESSAGES, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * n}]
        ),
        "messages[0].content",
    ),
    Row("max_tools", CHAT, lambda n: of(CHAT, tools=tools(n)), "tools"),
    Row(
        "max_tools",
        CHAT,
        lambda n: of(CHAT, functions=[{"name": f"f{i}"} for i in range(n)]),
        "functions",
    ),
    Row("max_tools", RESPONSES, lambda n: of(RESPONSES, tools=functions(n)), "tools"),
    Row("max_tools", MESSAGES, lambda n: of(MESSAGES, tools=named(n)), "tools"),
    Row("max_tools", OLLAMA, lambda n: of(OLLAMA, tools=tools(n)), "tools"),
    Row("max_stops", CHAT, lambda n: of(CHAT, stop=["x"] * n), "stop"),
    Row("max_stops", COMPLETIONS, lambda n: of(COMPLETIONS, stop_regex=["x"] * n), "stop_regex"),
    Row("max_stops", MESSAGES, lambda n: of(MESSAGES, stop_sequences=["x"] * n), "stop_sequences"),
    Row(
        "max_stops",
        GENERATE,
        lambda n: of(GENERATE, sampling_params={"stop": ["x"] * n}),
        "sampling_params.stop",
    ),
    Row("max_stop_chars", CHAT, lambda n: of(CHAT, stop="x" * n), "stop[0]"),
    Row("max_stop_chars", COMPLETIONS, lambda n: of(COMPLETIONS, stop=["x" * n]), "stop[0]"),
    Row(
        "max_logit_biases",
        CHAT,
        lambda n: of(CHAT, logit_bias={f"{i % 257:0{3 + i // 257}d}": 0 for i in range(n)}),
        "logit_bias",
    ),
    Row("max_prompts", COMPLETIONS, lambda n: of(COMPLETIONS, prompt=["a"] * n), "prompt"),
    Row("max_prompts", COMPLETIONS, lambda n: of(COMPLETIONS, prompt=[[97]] * n), "prompt"),
    Row("max_prompts", GENERATE, lambda n: of(GENERATE, text=["a"] * n), "text"),
    Row("max_prompts", TOKENIZE, lambda n: of(TOKENIZE, prompt=["a"] * n), "prompt"),
    Row("max_prompts", "/detokenize", lambda n: {"tokens": [[97]] * n}, "tokens"),
    # products and sizes of outputs
    Row("max_n", CHAT, lambda n: of(CHAT, n=n), "n"),
    Row("max_n", COMPLETIONS, lambda n: of(COMPLETIONS, n=n), "n"),
    Row("max_n", COMPLETIONS, lambda n: of(COMPLETIONS, best_of=n), "best_of"),
    Row("max_n", GENERATE, lambda n: of(GENERATE, sampling_params={"n": n}), "sampling_params.n"),
    Row(
        "max_top_logprobs", CHAT, lambda n: of(CHAT, logprobs=True, top_logprobs=n), "top_logprobs"
    ),
    Row("max_top_logprobs", COMPLETIONS, lambda n: of(COMPLETIONS, logprobs=n), "logprobs"),
    Row(
        "max_top_logprobs",
        COMPLETIONS,
        lambda n: of(COMPLETIONS, prompt_logprobs=n),
        "prompt_logprobs",
    ),
    Row(
        "max_top_logprobs",
        GENERATE,
        lambda n: of(GENERATE, return_logprob=True, top_logprobs_num=n),
        "top_logprobs_num",
    ),
    Row("max_top_logprobs", RESPONSES, lambda n: of(RESPONSES, top_logprobs=n), "top_logprobs"),
    # constraints
    Row("max_source_bytes", CHAT, lambda n: schema(padded(n)), FORMAT),
    Row(
        "max_source_bytes",
        COMPLETIONS,
        lambda n: of(COMPLETIONS, ebnf=f'root ::= "{"a" * (n - 11)}"'),
        "ebnf",
    ),
    Row("max_depth", CHAT, lambda n: schema(nested(n)), FORMAT, says=""),
    Row("max_nodes", CHAT, lambda n: schema({"examples": [[]] * (n - 2)}), FORMAT, says=""),
]
FIXED = [
    Row("max_pattern_bytes", CHAT, lambda n: of(CHAT, regex="a" * n), "regex", 2048),
    Row("max_repeats", CHAT, lambda n: of(CHAT, regex=f"a{{{n}}}"), "regex", 10_000),
    Row("max_repeats", CHAT, lambda n: of(CHAT, ebnf=f'root ::= "a"{{1,{n}}}'), "ebnf", 10_000),
    Row(
        "max_choices",
        COMPLETIONS,
        lambda n: of(COMPLETIONS, structured_outputs={"choice": [f"c{i}" for i in range(n)]}),
        "structured_outputs.choice",
        1024,
        says="",
    ),
]


async def post(server: FakeServer, path: str, body: Any) -> tuple[httpx.Response, str]:
    """Return the answer, and the lines of the counter of refusals."""
    content = body if isinstance(body, str) else json.dumps(body)
    async with make_client(server) as client:
        response = await client.post(path, content=content, headers=JSON)
        metrics = (await client.get("/metrics")).text
    lines = [line for line in metrics.splitlines() if line.startswith("remora_refusals_total")]
    return response, "\n".join(lines)


def counted(limit: str) -> str:
    return f'remora_refusals_total{{limit="{limit}",model_name="{MODEL}"}} 1.0'


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error, whatever the dialect."""
    error = response.json()["error"]
    return error if isinstance(error, dict) else {"message": error}


async def check(row: Row, at: int, **sections: Any) -> None:
    taken, nothing = await post(make_server(**sections), row.path, row.make(at))
    assert (taken.status_code, nothing) == (200, ""), taken.text[:300]

    refused, lines = await post(make_server(**sections), row.path, row.make(at + 1))
    error = error_of(refused)
    assert refused.status_code == 400
    assert error.get("param", row.param) == row.param
    assert str(at) in error["message"]
    assert row.says.format(at + 1) in error["message"]
    assert lines == counted(row.limit)


@pytest.mark.parametrize("row", ROWS + FIXED, ids=str)
async def test_what_is_at_a_limit_is_taken_and_one_more_is_refused(row: Row) -> None:
    await check(row, row.at)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.observes(
    "limits.max_json_depth",
    "limits.max_json_digits",
    "limits.max_messages",
    "limits.max_parts",
    "limits.max_tools",
    "limits.max_stops",
    "limits.max_stop_chars",
    "limits.max_logit_biases",
    "limits.max_prompts",
    "limits.max_top_logprobs",
    "grammar.max_source_bytes",
    "grammar.max_depth",
    "grammar.max_nodes",
)
async def test_the_operators_limit_counts(row: Row) -> None:
    section = "limits" if row.limit in LimitsSection.model_fields else "grammar"
    model = LimitsSection if section == "limits" else GrammarSection
    lowest = next((m.ge for m in model.model_fields[row.limit].metadata if hasattr(m, "ge")), 1)
    at = max(int(lowest), row.at // 2)

    await check(row, at, **{section: {row.limit: at}})
