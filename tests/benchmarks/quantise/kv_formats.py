"""Decode steps at a long context with K and V in each format, in turns.

    python -m tests.benchmarks.quantise.kv_formats [--context 8000] [--streams 1,4] [--rounds 5]

One engine for each format decodes the same number of streams after prompts of random tokens. Prints
the median step and how many times as fast it is as that of the model's own format.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from remora.configs.load import parse_args
from remora.deployments.bench.machine import describe_machine
from remora.engine.engine import Engine
from remora.engine.launch import build_engine
from remora.engine.types import Request, SamplingParams

STEPS = 8  # of a round


def make_engine(model: str, kv_dtype: str, num_streams: int, context: int) -> Engine:
    """Return an engine whose streams have all made their first token."""
    engine = {
        "kv_dtype": kv_dtype,
        "kv_tokens": num_streams * (context + 1024),
        "max_running_requests": num_streams,
        "prefix_cache": False,
    }
    built = build_engine(parse_args({"model": {"path": model}, "engine": engine})).engine
    numbers = random.Random(0)
    sampling = SamplingParams(max_tokens=190, temperature=0.0, ignore_eos=True)
    for stream in range(num_streams):
        prompt = [numbers.randrange(100, 40_000) for _ in range(context)]
        built.add(Request(request_id=f"s{stream}", prompt_ids=prompt, sampling=sampling))
    started: set[str] = set()
    while len(started) < num_streams:
        started |= {output.request_id for output in built.step() if output.token_ids}
    return built


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--formats", default="auto,int8,fp8_e4m3,fp8_e5m2")
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    print(describe_machine())
    formats = asked.formats.split(",")
    for num_streams in map(int, asked.streams.split(",")):
        engines = {
            name: make_engine(asked.model, name, num_streams, asked.context) for name in formats
        }
        steps: dict[str, list[float]] = {name: [] for name in formats}
        for _ in range(asked.rounds):
            for name, engine in engines.items():
                for _ in range(STEPS):
                    begun = time.perf_counter()
                    engine.step()
                    steps[name].append(time.perf_counter() - begun)
        for name, times in steps.items():
            median = statistics.median(times)
            ratio = statistics.median(steps[formats[0]]) / median
            print(
                f"{num_streams} streams after {asked.context:,} tokens, {name:9} "
                f"{median * 1e3:7.2f} ms a step, {ratio:.2f} x {formats[0]}"
            )
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
