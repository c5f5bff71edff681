"""The share of the machine's read rate at which one stream decodes, both measured in turns.

    python -m tests.benchmarks.quantise.read_share MODEL [--tokens 256] [--json]

After every four steps of a stream, of which the first wakes threads and does not count, an array of
half a gigabyte is summed three times. `share` is the median of the pairs: the bytes of weights of a
step by its time, to the rate of the sum. Where others share the memory, rates change within
seconds, and a bound that is measured before or after a run says little about it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from remora.configs.load import parse_args
from remora.deployments.bench.workloads import OFFLINE, token_prompts
from remora.engine.launch import build_engine
from remora.engine.types import Request, SamplingParams

SUM_BYTES = 512 * 2**20
STEPS, SUMS = 4, 3  # of a pair
REST_S = 0.01  # until waiting threads of the other side sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    """Medians of the pairs; rates in 10^9 bytes per second."""

    share: float
    low: float
    high: float
    decode_gb_s: float
    sum_gb_s: float
    num_pairs: int


def main() -> None:
    """Print the share of a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.model, options.tokens)
    text = json.dumps(asdict(found)) if options.json else str(found)
    sys.stdout.write(text + "\n")


def measure(model: Path, num_tokens: int) -> ReadShare:
    """Decode one stream, and sum in between."""
    sections = {"model": {"path": str(model)}, "engine": {"kv_tokens": 2048, "device": "cpu"}}
    built = build_engine(parse_args(sections), show_progress=False)
    engine = built.engine
    workload = OFFLINE["decode"].resized(outputs=num_tokens)
    (prompt,) = token_prompts(workload, seed=0, vocab_size=built.facts.vocab_size)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    numbers = torch.ones(SUM_BYTES // 8, dtype=torch.int64)
    pairs = []
    try:
        engine.add(Request(request_id="stream", prompt_ids=prompt, sampling=sampling))
        for _ in range(STEPS):  # the prompt, and the first tokens
            engine.step()
        torch.set_num_threads(built.plan.num_threads)
        numbers.sum()
        for _ in range((num_tokens - STEPS) // STEPS):
            steps = times(engine.step, STEPS)[1:]  # the first wakes the threads
            time.sleep(REST_S)
            sums = times(numbers.sum, SUMS)
            time.sleep(REST_S)
            decode = built.step_weight_bytes / statistics.median(steps)
            pairs.append((decode / 1e9, SUM_BYTES / statistics.median(sums) / 1e9))
    finally:
        engine.close()
    shares = [decode / read for decode, read in pairs]
    low, middle, high = statistics.quantiles(shares, n=4)
    return ReadShare(
        share=middle,
        low=low,
        high=high,
        decode_gb_s=statistics.median(decode for decode, _ in pairs),
        sum_gb_s=statistics.median(read for _, read in pairs),
        num_pairs=len(pairs),
    )


def times(call: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of `count` calls."""
    found = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return found


if __name__ == "__main__":
    main()
