"""Compare two servers that run: streams in strict alternation, so that both see the same machine.

    python -m tests.benchmarks.start.streams URL_A URL_B [--rounds 60] [--streams 1,16]

Each round sends the same prompts to one and then to the other, in changing order; each is asked
for TOKENS tokens by each stream. Prints the medians of the seconds of a round and the mean ratio
with its standard error, which `remora bench compare` cannot tell for a difference of a percent.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time

import httpx

NUM_PROMPT, TOKENS = 64, 96
FIRST_ID = 1000


async def stream(client: httpx.AsyncClient, url: str, token: int) -> None:
    """Read a stream to its end. Raises if it is not whole."""
    body = {
        "prompt": [FIRST_ID + token] * NUM_PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        is_whole = False
        async for line in answer.aiter_lines():
            is_whole = is_whole or line == "data: [DONE]"
    assert is_whole, url


async def seconds(client: httpx.AsyncClient, url: str, first: int, num_streams: int) -> float:
    """Return the time of simultaneous streams."""
    began = time.perf_counter()
    await asyncio.gather(*(stream(client, url, first + number) for number in range(num_streams)))
    return time.perf_counter() - began


async def compare(urls: tuple[str, str], rounds: int, num_streams: int) -> None:
    """Print a row."""
    found: dict[str, list[float]] = {url: [] for url in urls}
    async with httpx.AsyncClient(timeout=600) as client:
        for url in urls:
            await seconds(client, url, 0, num_streams)
        for number in range(rounds):
            first = (number + 1) * num_streams
            for url in urls if number % 2 else reversed(urls):
                found[url].append(await seconds(client, url, first, num_streams))
    ratios = [math.log(b / a) for a, b in zip(found[urls[0]], found[urls[1]], strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(rounds)
    medians = " | ".join(f"{statistics.median(found[url]):.3f}" for url in urls)
    ratio = math.exp(statistics.mean(ratios))
    print(f"| {num_streams} | {medians} | {ratio:.3f} +- {error:.3f} |", flush=True)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("urls", nargs=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--streams", default="1,16")
    options = parser.parse_args()
    first, second = options.urls
    print("| streams | A, s | B, s | rate of A / rate of B |\n|---|---|---|---|")
    for num_streams in map(int, options.streams.split(",")):
        asyncio.run(compare((first, second), options.rounds, num_streams))


if __name__ == "__main__":
    main()
