"""Workloads as data: number, lengths and concurrency of requests, and their prompts.

Prompts are token ids drawn from a fixed seed, so that every target gets the same ones. A server
that accepts no token ids gets as many common words. Knows no target.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")

SEED = 20_261_121
# Ids within every common vocabulary: above its special tokens, below its end.
FIRST_ID, LAST_ID = 1000, 30_000
# With a leading space, each is one token in nearly every vocabulary.
_TEXT = """
the of and to in is that for was on are with as his they at be this from have or by one
had not but what all were when we there can an your which their said if do will each
about how up out them then she many some so these would other into has more her two like
him see time could no make than first been its who now people my made over did down only
way find use may
"""
WORDS = _TEXT.split()
SCHEMA: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["city", "river", "mountain"]},
            "height_m": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "kind", "height_m", "tags"],
        "additionalProperties": False,
    }
)


class Kind(StrEnum):
    """The endpoint of a server that a workload uses."""

    COMPLETION = "completion"
    EMBEDDING = "embedding"
    JSON_SCHEMA = "json-schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one size, all sent at once unless `concurrency` limits them.

    input_tokens:   length of each prompt, including the shared part
    shared_tokens:  number of leading tokens that are the same in every prompt
    """

    name: str
    num_requests: int
    input_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    concurrency: int | None = None
    kind: Kind = Kind.COMPLETION

    @property
    def is_prefill(self) -> bool:
        """Whether the workload measures prompts only."""
        return self.output_tokens == 1

    @property
    def num_at_once(self) -> int:
        """Maximum number of concurrent requests."""
        return min(self.concurrency or self.num_requests, self.num_requests)

    def resized(
        self, requests: int | None = None, inputs: int | None = None, outputs: int | None = None
    ) -> Workload:
        """Return the workload in another size.

        A single request and a single output token stay single; the shared part scales with the
        input.
        """
        input_tokens = inputs or self.input_tokens
        return replace(
            self,
            num_requests=(requests or self.num_requests) if self.num_requests > 1 else 1,
            input_tokens=input_tokens,
            output_tokens=(outputs if self.output_tokens > 1 else None) or self.output_tokens,
            shared_tokens=self.shared_tokens * input_tokens // self.input_tokens,
        )

    @property
    def shape(self) -> str:
        """The size of the workload in a few characters."""
        shared = f" ({self.shared_tokens} shared)" if self.shared_tokens else ""
        return f"{self.num_requests} x {self.input_tokens}{shared}/{self.output_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size of workloads from the command line; None keeps the workload's own value."""

    requests: int | None = None
    inputs: int | None = None
    outputs: int | None = None

    def of(self, workload: Workload) -> Workload:
        """Return the workload in this size."""
        return workload.resized(self.requests, self.inputs, self.outputs)

    def options(self) -> list[str]:
        """Return the size as command-line options."""
        given = {"--requests": self.requests, "--input": self.inputs, "--output": self.outputs}
        return [text for name, value in given.items() if value for text in (name, str(value))]


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


OFFLINE = _named(
    Workload(name="decode", num_requests=1, input_tokens=128, output_tokens=256),
    Workload(name="prefill", num_requests=1, input_tokens=1500, output_tokens=1),
    Workload(name="batch", num_requests=64, input_tokens=256, output_tokens=128),
    Workload(
        name="shared-prefix",
        num_requests=64,
        input_tokens=1032,
        output_tokens=64,
        shared_tokens=1000,
    ),
    Workload(
        name="embedding",
        num_requests=64,
        input_tokens=128,
        output_tokens=0,
        kind=Kind.EMBEDDING,
    ),
    Workload(
        name="json-schema",
        num_requests=16,
        input_tokens=64,
        output_tokens=128,
        kind=Kind.JSON_SCHEMA,
    ),
)


def online(concurrency: int) -> Workload:
    """Return the workload of a server with `concurrency` clients, each sending sequentially."""
    return Workload(
        name=f"online-{concurrency}",
        num_requests=max(4, 3 * concurrency),
        input_tokens=256,
        output_tokens=128,
        concurrency=concurrency,
    )


def find(name: str) -> Workload | None:
    """Return the workload of that name, including `online-N`; None if there is none."""
    number = name.removeprefix("online-")
    if number != name and number.isdecimal() and int(number) > 0:
        return online(int(number))
    return OFFLINE.get(name)


def token_prompts(workload: Workload, *, seed: int, vocab_size: int = LAST_ID) -> list[list[int]]:
    """Return `input_tokens` ids for each request; only the shared part is the same."""
    last = min(vocab_size, LAST_ID)
    first = FIRST_ID if last > 2 * FIRST_ID else last // 2
    return _prompts(workload, range(first, last), seed)


def word_prompts(workload: Workload, *, seed: int) -> list[str]:
    """Return prompts of about `input_tokens` tokens, for servers that accept text only."""
    return [" ".join(words) for words in _prompts(workload, WORDS, seed)]


def _prompts(workload: Workload, alphabet: Sequence[T], seed: int) -> list[list[T]]:
    numbers = random.Random(f"{SEED} {seed}")
    shared = numbers.choices(alphabet, k=workload.shared_tokens)
    own = workload.input_tokens - workload.shared_tokens
    return [shared + numbers.choices(alphabet, k=own) for _ in range(workload.num_requests)]


def chat_messages(seed: int, number: int) -> list[dict[str, str]]:
    """Return a conversation that requests an object of SCHEMA."""
    words = " ".join(random.Random(f"{SEED} {seed} {number}").choices(WORDS, k=24))
    return [{"role": "user", "content": f"Describe a place as JSON. Think of: {words}."}]
