"""Measure how hostile constraints affect other streams.

    remora serve configs/smollm2.yaml          # in another terminal
    python tests/benchmarks/hostile.py http://127.0.0.1:8000 [--streams 4] [--rounds 3] [--pace 0.5]

Measures the time between the chunks of some streams: alone (idle), with requests for one token
(harmless), with as many whose constraints are made to hang, grow or crash the compiler and are
refused (refused), and with large constraints that are accepted (taken). Each round measures all
four. Prints p50 and p99 of each, and ratios of p99: to idle, and to harmless, since
a request that is answered takes part in a step like any other.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from itertools import cycle, pairwise
from typing import Any

import httpx

TOKENS = 160


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of many nested objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """Return a schema that references double at each level."""
    names = [f"n{level}" for level in range(levels)]
    defs: dict[str, Any] = {
        name: {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{after}"}] * 2, "items": False}
        for name, after in pairwise(names)
    }
    return {"$defs": defs | {names[-1]: {"type": "null"}}, "$ref": "#/$defs/n0"}


def distinct(schema: Any, number: int) -> dict[str, Any]:
    """Return a schema that no cache knows: it also allows one constant."""
    defs = schema.pop("$defs", {})
    return {"$defs": defs, "anyOf": [schema, {"const": f"number {number}"}]}


def hostile_fields(number: int) -> list[dict[str, Any]]:
    """Return constraints that a naive server would choke on; `number` tells rounds apart."""
    schemas: list[Any] = [
        nested(30),
        nested(200),
        doubling(24),
        {"type": "string", "pattern": "(a{1,100}){1,100}"},
        {"type": "string", "minLength": 10**6},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
        {"anyOf": [{"enum": [f"{n}-{m}" for m in range(40)]} for n in range(40)]},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(900)}},
    ]
    fields: list[dict[str, Any]] = [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": distinct(schema, number)},
            }
        }
        for schema in schemas
    ]
    regexes = ["(a+)+$", "(((a{1,30}){1,30}){1,30})", "(.|.)*(.|.)*x", "[\\s\\S]{9999}", "(?=a)b"]
    grammars = ["root ::= root root", 'root ::= "a" | ' + " | ".join('"b"' for _ in range(9000))]
    fields += [{"structured_outputs": {"regex": f"{number}{regex}"}} for regex in regexes]
    fields += [
        {"structured_outputs": {"grammar": f'{grammar}\nn{number} ::= "a"'}} for grammar in grammars
    ]
    return fields


async def gaps_of_stream(client: httpx.AsyncClient, number: int) -> list[float]:
    """Return the seconds between the chunks of one stream."""
    body = {
        "prompt": f"Story number {number}:",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    gaps, last = [], None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
    return gaps


class Arm:
    """Requests of one kind, and what came of them. `numbers`: which of the hostile constraints."""

    def __init__(self, numbers: list[int | None]) -> None:
        self.numbers = numbers
        self.gaps: list[float] = []
        self.answers: Counter[int] = Counter()

    async def send(self, client: httpx.AsyncClient, pace_s: float) -> None:
        """Send requests, one after the other, until cancelled."""
        for index in cycle(self.numbers):
            self.answers[await ask(client, index)] += 1
            await asyncio.sleep(pace_s)

    async def measure(self, client: httpx.AsyncClient, options: argparse.Namespace) -> None:
        """Add the gaps of some streams that run with the arm's requests."""
        senders = options.attackers if self.numbers else 0
        tasks = [asyncio.create_task(self.send(client, options.pace)) for _ in range(senders)]
        await asyncio.sleep(0.5)
        streams = (gaps_of_stream(client, number) for number in range(options.streams))
        gaps = await asyncio.gather(*streams)
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(end, asyncio.CancelledError):
                raise RuntimeError("an attacker gave up") from end
        self.gaps += [gap for of_stream in gaps for gap in of_stream]


async def ask(client: httpx.AsyncClient, index: int | None) -> int:
    """Ask for one token, under the hostile constraint of this number; returns the status."""
    fields = {} if index is None else hostile_fields(time.time_ns())[index]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    return response.status_code


async def arms_of(client: httpx.AsyncClient) -> dict[str, Arm]:
    """Return the arms; the server says which constraints it refuses."""
    numbers: list[int | None] = list(range(len(hostile_fields(0))))
    statuses = [await ask(client, number) for number in numbers]
    refused = [number for number, status in zip(numbers, statuses, strict=True) if status == 400]
    taken = [number for number in numbers if number not in refused]
    kinds: dict[str, list[int | None]] = {
        "idle": [],
        "harmless": [None],
        "refused": refused,
        "taken": taken,
    }
    return {name: Arm(of_kind) for name, of_kind in kinds.items()}


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.5, help="seconds between two of one's")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    async with httpx.AsyncClient(base_url=options.url, timeout=120) as client:
        arms = await arms_of(client)
        for _ in range(options.rounds):
            for arm in arms.values():
                await arm.measure(client, options)
    for name, arm in arms.items():
        print(
            f"{name:9} p50 {statistics.median(arm.gaps) * 1e3:6.1f} ms  p99"
            f" {p99(arm.gaps) * 1e3:6.1f} ms  of idle {p99(arm.gaps) / p99(arms['idle'].gaps):.2f}"
            f"  of harmless {p99(arm.gaps) / p99(arms['harmless'].gaps):.2f}"
            f"  ({len(arm.gaps)} gaps)  answers {dict(arm.answers)}"
        )


if __name__ == "__main__":
    asyncio.run(main())
