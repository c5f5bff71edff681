"""What hostile constraints do to the streams of others.

    remora serve configs/smollm2.yaml          # in another terminal
    python tests/benchmarks/hostile.py http://127.0.0.1:8000 [--streams 4] [--rounds 3] [--pace 0.5]

Measures the time between the chunks of some streams, alone and while constraints that are made to
hang, to grow or to crash a compiler keep coming in; both in each round, in turns. Prints p50 and
p99 of each and the ratio of the p99s, and says how the hostile requests were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from itertools import count, pairwise
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


async def attack(client: httpx.AsyncClient, answers: Counter[str], pace_s: float) -> None:
    """Send hostile requests, one after the other, until cancelled.

    pace_s:  between two of them; with none, what they cost is that of any requests so many
    """
    for number in count(time.time_ns()):
        for fields in hostile_fields(number):
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
            response = await client.post("/v1/chat/completions", json=body)
            answers[str(response.status_code)] += 1
            await asyncio.sleep(pace_s)


async def measure(
    client: httpx.AsyncClient, streams: int, attackers: int, pace_s: float
) -> tuple[list[float], Counter[str]]:
    """Return all gaps of some streams, beside so many attackers."""
    answers: Counter[str] = Counter()
    tasks = [asyncio.create_task(attack(client, answers, pace_s)) for _ in range(attackers)]
    await asyncio.sleep(0.5)
    all_gaps = await asyncio.gather(*(gaps_of_stream(client, number) for number in range(streams)))
    for task in tasks:
        task.cancel()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(end, asyncio.CancelledError):
            raise RuntimeError("an attacker gave up") from end
    return [gap for gaps in all_gaps for gap in gaps], answers


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    idle: list[float] = []
    attacked: list[float] = []
    answers: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=args.url, timeout=120) as client:
        await measure(client, args.streams, 1, args.pace)  # what is done once
        for _ in range(args.rounds):
            idle += (await measure(client, args.streams, 0, args.pace))[0]
            gaps, new = await measure(client, args.streams, args.attackers, args.pace)
            attacked += gaps
            answers += new
    for name, values in (("idle", idle), ("attacked", attacked)):
        print(
            f"{name:9} p50 {statistics.median(values) * 1e3:6.1f} ms"
            f"  p99 {p99(values) * 1e3:6.1f} ms  ({len(values)} gaps)"
        )
    print(f"p99 ratio {p99(attacked) / p99(idle):.2f}   answers {dict(answers)}")


if __name__ == "__main__":
    asyncio.run(main())
