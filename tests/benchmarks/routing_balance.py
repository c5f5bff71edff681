"""Time to the first token behind three replicas when one prompt in ten is long.

    python tests/benchmarks/routing_balance.py [--seeds 5] [--calls 1500]
    python tests/benchmarks/routing_balance.py --real [--calls 150] [--rate 8]

The first on a virtual clock, with the real scheduler, cache, ledger and policies, for several seeds
and loads; the second through Ray Serve's proxy to three replicas of a small random model, each
policy with the same calls at the same times. Prints quantiles, and ratios to round robin's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, not by pytest

from tests.benchmarks.routing_cluster import (
    TIMEOUT,
    checkpoint,
    complete,
    quantile,
    ray_serve,
    replicas,
)
from tests.deployments.routing.loads import skewed_load
from tests.deployments.routing.simulation import Simulation

POLICIES = ("round_robin", "power_of_two", "shortest_queue")
# As in Serve's proxy, which reads no bodies.
BLIND = "shortest_queue, lengths unknown"
ARMS = (*POLICIES, BLIND)
SHORT_TOKENS = 96


def simulate(rate: float, num_routers: int, num_calls: int, seeds: int) -> None:
    """Print the median over seeds of the 99th percentile, and its ratio to round robin's."""
    ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
    waits: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm in ARMS:
            simulation = Simulation(
                arm.partition(",")[0],
                num_replicas=3,
                num_routers=num_routers,
                reads_prompts=arm != BLIND,
                seed=seed,
            )
            calls = simulation.run(skewed_load(num_calls, rate, seed=seed))
            short = [
                (call.first_token_s or 0.0) - call.arrived_s
                for call in calls
                if len(call.prompt) <= SHORT_TOKENS
            ]
            waits[arm].append((simulation.first_token_s(0.99), quantile(short, 0.99)))
            ratios[arm].append(waits[arm][-1][0] / waits["round_robin"][-1][0])
    for arm in ARMS:
        everyone, short_only = (statistics.median(w[i] for w in waits[arm]) for i in (0, 1))
        middle, low, high = (f(ratios[arm]) for f in (statistics.median, min, max))
        print(
            f"| {rate:g}/s | {num_routers} | {arm} | {everyone:.2f} | {short_only:.2f}"
            f" | {middle:.2f} ({low:.2f}-{high:.2f}) |",
            flush=True,
        )


async def send(port: int, num_calls: int, rate: float) -> tuple[list[float], list[float]]:
    """Send the load; returns times to first token of all calls, and of the short ones."""
    chance = random.Random(1)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT, limits=httpx.Limits()
    ) as client:
        for _ in range(12):
            await complete(client, "warm up", 2)
        tasks: list[tuple[bool, asyncio.Task[float]]] = []
        for _ in range(num_calls):
            await asyncio.sleep(chance.expovariate(rate))
            is_long = chance.random() < 0.1
            num_words = chance.randint(500, 600) if is_long else chance.randint(8, 24)
            words = " ".join(str(chance.randrange(10_000)) for _ in range(num_words))
            tasks.append((is_long, asyncio.create_task(_wait(client, words))))
        waits = [(is_long, await task) for is_long, task in tasks]
    return [wait for _, wait in waits], [wait for is_long, wait in waits if not is_long]


async def _wait(client: httpx.AsyncClient, prompt: str) -> float:
    return (await complete(client, prompt, 16)).first_token_s


def measure(num_calls: int, rate: float) -> None:
    """Run all policies one after another, twice, over real replicas."""
    with checkpoint() as model, ray_serve() as port:
        for round_number in (1, 2):
            for policy in POLICIES:
                with replicas(model, 3, policy=policy, gateway="off"):
                    time.sleep(1)
                    everyone, short = asyncio.run(send(port, num_calls, rate))
                print(
                    f"| {round_number} | {policy} | {quantile(everyone, 0.5):.3f}"
                    f" | {quantile(everyone, 0.99):.3f} | {quantile(short, 0.99):.3f} |",
                    flush=True,
                )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--rate", type=float, default=8.0)
    options = parser.parse_args()
    if options.real:
        measure(options.calls or 150, options.rate)
        return
    for rate in (8.0, 12.0):
        for num_routers in (1, 4):
            simulate(rate, num_routers, options.calls or 1500, options.seeds)


if __name__ == "__main__":
    main()
