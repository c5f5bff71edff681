"""Requests whose answers are known: each is greedy or seeded, so it has one right answer.

Names of requests are part of reports: a name always means the same body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": SCHEMA, "strict": True},
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    status:          the status of the right answer
    may_be_missing:  whether 404 is right, too: its adapter comes and goes
    """

    name: str
    path: str
    body: Mapping[str, Any]
    status: int = 200
    may_be_missing: bool = False

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def survives_replicas(self) -> bool:
        """Whether a gateway with `resume_on_failure` completes it if its replica dies."""
        return not self.is_stream or self.body.get("n", 1) == 1

    def of_model(self, model: str) -> Ask:
        """Return the same request to another model or adapter."""
        return replace(self, name=f"{self.name}@{model}", body={**self.body, "model": model})


def _text(name: str, number: int, num_tokens: int, **fields: Any) -> Ask:
    prompt = f"Number {number}: the quick brown fox jumps over {number * 7919 % 1000}"
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return Ask(name, COMPLETIONS, {**body, **fields})


def _chat(name: str, question: str, num_tokens: int, **fields: Any) -> Ask:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": num_tokens,
        "temperature": 0,
    }
    return Ask(name, CHAT, {**body, **fields})


def generation_asks(num_tokens: int) -> list[Ask]:
    """Return requests of every kind for the model `m`; streams have up to `num_tokens` tokens."""
    long, half = num_tokens, max(1, num_tokens // 2)
    seeded = {"temperature": 0.9, "top_p": 0.9, "seed": 11}
    prose = "Pack my box with five dozen liquor jugs. " * 40
    json_format = {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
    }
    return [
        _text("greedy stream", 1, long, stream=True),
        _text("greedy stream 2", 2, long, stream=True),
        _text("seeded stream", 3, long, stream=True, **seeded),
        _text("two seeded streams", 4, half, stream=True, n=2, **seeded),
        _text("whole", 5, half),
        _text("whole of three", 6, half, n=3, **seeded),
        _text("long prompt", 7, 24, prompt=prose, stream=True),
        _chat("chat stream", "What is the capital of France?", long, stream=True, ignore_eos=True),
        _chat("chat", "Tell a story about a fox.", half, ignore_eos=True, **seeded),
        _chat("schema", "Where is it sunny?", 60, response_format=json_format),
        _chat("schema stream", "Is it sunny?", 60, response_format=json_format, stream=True),
    ]


def tool_asks() -> list[Ask]:
    """Return calls of a tool, for a server with a tool parser."""
    choice = {"type": "function", "function": {"name": "weather"}}
    fields = {"tools": [WEATHER], "tool_choice": choice}
    return [
        _chat("tool", "How is the weather?", 80, **fields),
        _chat("tool stream", "And the weather in Rome?", 80, stream=True, **fields),
    ]


def bad_asks() -> list[Ask]:
    """Return requests that must be refused, each with one status."""
    return [
        replace(_text("bad temperature", 1, 4, temperature=-1), status=400),
        replace(_text("bad length", 1, 10**7), status=400),
        replace(_text("unknown model", 1, 4, model="none such"), status=404),
        replace(
            _chat("bad schema", "x", 4, response_format={"type": "json_schema", "json_schema": 7}),
            status=400,
        ),
    ]


def embedding_asks(model: str) -> list[Ask]:
    """Return requests for vectors."""
    texts = ["The quick brown fox", "What is the capital of France?"]
    return [Ask("vectors", EMBEDDINGS, {"model": model, "input": texts})]


def of_adapters(asks: Sequence[Ask], adapters: Sequence[str]) -> list[Ask]:
    """Return the same requests to adapters."""
    return [ask.of_model(adapter) for adapter in adapters for ask in asks]
