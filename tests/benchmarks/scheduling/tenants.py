"""Measure what a heavy tenant costs a light one, on SmolLM2 in this process.

    python -m tests.benchmarks.scheduling.tenants [--seconds 15] [--threads 2]

The heavy tenant always has QUEUED requests waiting; the light one sends a short request every
second. Prints the time to the first token of the light tenant (p50, p99): alone, next to the heavy
one, and next to it if the engine knows no tenants. Then the tokens per second of the engine with
tenants relative to the same load without them, and the shares of two tenants of equal weight that
both always have work.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

import numpy as np

from remora.configs.load import parse_args
from remora.engine.launch import build_engine
from remora.engine.tenants import EVERYONE, Tenant
from remora.engine.types import Request, SamplingParams
from remora.engine.weights.resolve_model import SMOLLM2

QUEUED = 40
HEAVY_PROMPT, HEAVY_OUTPUT = 300, 60
LIGHT_PROMPT, LIGHT_OUTPUT = 30, 8
PERIOD_S = 1.0
HEAVY, LIGHT = Tenant(name="heavy"), Tenant(name="light")


class Load:
    """An engine, and tenants that send it requests."""

    def __init__(self, num_threads: int) -> None:
        engine = {"num_threads": num_threads, "kv_tokens": 16384, "max_running_requests": 16}
        config = parse_args({"model": {"path": SMOLLM2}, "engine": engine})
        built = build_engine(config, show_progress=False)
        self._engine, self._vocab_size = built.engine, built.facts.vocab_size
        self._random = random.Random(0)
        self._num_sent = 0

    def run(
        self, seconds: float, backlogged: tuple[Tenant, ...], light: Tenant | None
    ) -> tuple[list[float], float, Counter[str]]:
        """Return the light tenant's times to the first token, the tokens per second, and the
        prompt and output tokens of each sender.

        backlogged:  always have requests that wait
        light:       None = sends nothing
        """
        sent_at, waits, tokens = dict[str, float](), list[float](), Counter[str]()
        lengths, num_waiting, begun = dict[str, int](), Counter[int](), set[str]()
        started = time.perf_counter()
        due = started
        while (now := time.perf_counter()) < started + seconds:
            if light is not None and now >= due:
                sent_at[self._send(light, "light", LIGHT_PROMPT, LIGHT_OUTPUT)] = now
                due += PERIOD_S
            for number, tenant in enumerate(backlogged):
                while num_waiting[number] < QUEUED:
                    name = self._send(tenant, f"heavy{number}", HEAVY_PROMPT, HEAVY_OUTPUT)
                    lengths[name] = number
                    num_waiting[number] += 1
            if not self._engine.has_work:
                time.sleep(0.001)
                continue
            for output in self._engine.step():
                name = output.request_id
                sender = name.partition("/")[0]
                tokens[sender] += len(output.token_ids)
                if name in begun:
                    continue
                begun.add(name)
                tokens[sender] += LIGHT_PROMPT if sender == "light" else HEAVY_PROMPT
                if sender == "light":
                    waits.append(time.perf_counter() - sent_at[name])
                else:
                    num_waiting[lengths[name]] -= 1
        elapsed = time.perf_counter() - started
        unanswered = [time.perf_counter() - at for n, at in sent_at.items() if n not in begun]
        self._engine.abort_all()
        while self._engine.has_work:
            self._engine.step()
        self._engine.flush_cache()
        return waits + unanswered, tokens.total() / elapsed, tokens

    def _send(self, tenant: Tenant, sender: str, num_prompt: int, num_output: int) -> str:
        self._num_sent += 1
        name = f"{sender}/{self._num_sent}"
        ids = self._random.choices(range(1000, self._vocab_size), k=num_prompt)
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, prompt_ids=ids, sampling=sampling, tenant=tenant)
        self._engine.add(request)
        return name


def show(name: str, waits: list[float]) -> None:
    p50, p99 = np.percentile(waits, [50, 99])
    print(f"{name:<34}{1000 * p50:8.0f}{1000 * p99:8.0f} ms{len(waits):6} requests")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    seconds, load = options.seconds, Load(options.threads)
    load.run(2.0, (EVERYONE,), None)  # first-time work
    print(f"{'light tenant, first token':<34}{'p50':>8}{'p99':>8}")
    unfair, plain_rate, _ = load.run(seconds, (EVERYONE,), EVERYONE)
    show("alone", load.run(seconds, (), LIGHT)[0])
    waits, rate, _ = load.run(seconds, (HEAVY,), LIGHT)
    show("next to a heavy one", waits)
    show("next to it, without tenants*", unfair)
    print("* a request without an answer counts with its time until the end")
    print(f"tokens/s with tenants: {rate:.0f}, without {plain_rate:.0f}: {rate / plain_rate:.3f}")
    equal = (HEAVY, Tenant(name="other"))
    tokens = load.run(seconds, equal, None)[2]
    shares = [tokens[f"heavy{number}"] / tokens.total() for number in range(2)]
    print(f"shares of two equal tenants: {shares[0]:.3f} and {shares[1]:.3f}")


if __name__ == "__main__":
    main()
