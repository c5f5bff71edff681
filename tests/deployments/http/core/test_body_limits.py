"""The limits of bodies: a body at a limit is accepted, one above it is refused.

A refusal has its status, a message with the limit, and a count in the metrics. The configured
value of a limit, where there is a key, replaces the default.
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
    """A grammar service without a compiler: every constraint that passes its checks is valid."""

    def _grammar(self, source: Source) -> Future[Grammar]:
        done: Future[Grammar] = Future()
        done.set_result(FakeGrammar(Constraint(kind="json_schema", source=source.text)))  # type: ignore[arg-type]
        return done


def make_server(**sections: Any) -> FakeServer:
    """A server whose capacity far exceeds the limits."""
    config = make_server_config(**{"api": {"tool_parser": "hermes"}, **sections})
    plan = make_plan(max_model_len=10**7, num_pages=10**6, max_running_requests=4096)
    grammars = Grammars(config.grammar, CharTokenizer(), vocab_size=257, eos_token_ids=(EOS,))  # type: ignore[arg-type]
    return FakeServer(FakeEngine(text="A"), plan=plan, config=config, grammars=grammars)  # type: ignore[arg-type]


def of(path: str, **fields: Any) -> dict[str, Any]:
    """Return a valid body of a path with some fields changed."""
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
    """Return a schema of `depth` nested objects."""
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
    """One limit at one path.

    limit:  key of the configuration, and the counter's label
    make:   returns a body of the given size: an object, or JSON text
    """

    limit: str
    path: str
    make: Callable[[int], Any]
    param: str | None = None
    default: int | None = None

    @property
    def at(self) -> int:
        sections = (LimitsSection(), GrammarSection())
        if self.default is not None:
            return self.default
        return int(next(getattr(s, self.limit) for s in sections if hasattr(s, self.limit)))

    def __str__(self) -> str:
        return f"{self.limit}-{self.path.rpartition('/')[2]}-{self.param}"


FORMAT = "response_format"


def row(limit: str, path: str, field: str, make: Callable[[int], Any], **options: Any) -> Row:
    """Return a row whose limit applies to one field."""
    options = {"param": field} | options
    return Row(limit, path, lambda n: of(path, **{field: make(n)}), **options)


def parts(kind: str) -> Callable[[int], Any]:
    return lambda n: [{"role": "user", "content": [{"type": kind, "text": "a"}] * n}]


def strings(n: int) -> list[str]:
    return ["x"] * n


def text(n: int) -> str:
    return "x" * n


def biases(n: int) -> dict[str, int]:
    return {f"{i % 257:0{3 + i // 257}d}": 0 for i in range(n)}


def formatted(source: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": source}}


def asking(name: str) -> Callable[[int], Any]:
    return lambda n: {name: strings(n) if name == "stop" else n}


PART, NAMES = "[0].content", "sampling_params"
ROWS = [
    # the JSON text
    Row("max_json_depth", COMPLETIONS, extra(lambda n: "[" * (n - 1) + "]" * (n - 1))),
    Row("max_json_depth", COMPLETIONS, extra(lambda n: '{"a":' * (n - 1) + "1" + "}" * (n - 1))),
    Row("max_json_digits", COMPLETIONS, extra(lambda n: "9" * n)),
    Row("max_json_digits", COMPLETIONS, extra(lambda n: "-" + "9" * n)),
    # counts of entries in a body
    row("max_messages", CHAT, "messages", turns),
    row("max_messages", RESPONSES, "input", turns),
    row("max_messages", MESSAGES, "messages", turns),
    row("max_messages", OLLAMA, "messages", turns),
    row("max_messages", TOKENIZE, "messages", turns),
    row("max_parts", CHAT, "messages", parts("text"), param=f"messages{PART}"),
    row("max_parts", RESPONSES, "input", parts("input_text"), param=f"input{PART}"),
    row("max_parts", MESSAGES, "messages", parts("text"), param=f"messages{PART}"),
    row("max_tools", CHAT, "tools", tools),
    row("max_tools", CHAT, "functions", lambda n: [{"name": f"f{i}"} for i in range(n)]),
    row("max_tools", RESPONSES, "tools", functions),
    row("max_tools", MESSAGES, "tools", named),
    row("max_tools", OLLAMA, "tools", tools),
    row("max_stops", CHAT, "stop", strings),
    row("max_stops", COMPLETIONS, "stop_regex", strings),
    row("max_stops", MESSAGES, "stop_sequences", strings),
    row("max_stops", GENERATE, NAMES, asking("stop"), param=f"{NAMES}.stop"),
    row("max_stop_chars", CHAT, "stop", text, param="stop[0]"),
    row("max_stop_chars", COMPLETIONS, "stop", lambda n: [text(n)], param="stop[0]"),
    row("max_logit_biases", CHAT, "logit_bias", biases),
    row("max_prompts", COMPLETIONS, "prompt", strings),
    row("max_prompts", COMPLETIONS, "prompt", lambda n: [[97]] * n),
    row("max_prompts", GENERATE, "text", strings),
    row("max_prompts", TOKENIZE, "prompt", strings),
    row("max_prompts", "/detokenize", "tokens", lambda n: [[97]] * n),
    # products and sizes of outputs
    row("max_n", CHAT, "n", int),
    row("max_n", COMPLETIONS, "n", int),
    row("max_n", COMPLETIONS, "best_of", int),
    row("max_n", GENERATE, NAMES, asking("n"), param=f"{NAMES}.n"),
    Row("max_top_logprobs", CHAT, lambda n: of(CHAT, logprobs=True, top_logprobs=n),
        "top_logprobs"),
    row("max_top_logprobs", COMPLETIONS, "logprobs", int),
    row("max_top_logprobs", COMPLETIONS, "prompt_logprobs", int),
    Row("max_top_logprobs", GENERATE, lambda n: of(GENERATE, return_logprob=True,
                                                   top_logprobs_num=n), "top_logprobs_num"),
    row("max_top_logprobs", RESPONSES, "top_logprobs", int),
    # constraints
    row("max_source_bytes", CHAT, FORMAT, lambda n: formatted(padded(n))),
    row("max_source_bytes", COMPLETIONS, "ebnf", lambda n: f'root ::= "{"a" * (n - 11)}"'),
    row("max_depth", CHAT, FORMAT, lambda n: formatted(nested(n))),
    row("max_nodes", CHAT, FORMAT, lambda n: formatted({"examples": [[]] * (n - 2)})),
]  # fmt: skip
FIXED = [
    row("max_pattern_bytes", CHAT, "regex", lambda n: "a" * n, default=2048),
    row("max_repeats", CHAT, "regex", lambda n: f"a{{{n}}}", default=10_000),
    row("max_repeats", CHAT, "ebnf", lambda n: f'root ::= "a"{{1,{n}}}', default=10_000),
    row(
        *("max_choices", COMPLETIONS, "structured_outputs"),
        lambda n: {"choice": [f"c{i}" for i in range(n)]},
        param="structured_outputs.choice",
        default=1024,
    ),
]


async def post(server: FakeServer, path: str, body: Any) -> tuple[httpx.Response, str]:
    """Return the response, and the refusal counter's lines."""
    content = body if isinstance(body, str) else json.dumps(body)
    async with make_client(server) as client:
        response = await client.post(path, content=content, headers=JSON)
        metrics = (await client.get("/metrics")).text
    lines = [line for line in metrics.splitlines() if line.startswith("remora_refusals_total")]
    return response, "\n".join(lines)


def counted(limit: str) -> str:
    return f'remora_refusals_total{{limit="{limit}",model_name="{MODEL}"}} 1.0'


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error in any dialect's response."""
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
