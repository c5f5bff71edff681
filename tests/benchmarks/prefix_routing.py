"""Prompt tokens found in caches when 16 conversations are spread over several replicas.

    python tests/benchmarks/prefix_routing.py [--seeds 5]
    python tests/benchmarks/prefix_routing.py --real [--turns 5]

The first on a virtual clock, with the real scheduler, cache, ledger and policies; the second
through a gateway to replicas of a small random model. Prints for each policy the share of prompt
tokens that were cached, and how unevenly the work was spread.
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
    Answered,
    checkpoint,
    complete,
    quantile,
    ray_serve,
    replicas,
)
from tests.deployments.routing.loads import conversations
from tests.deployments.routing.simulation import Simulation
from tests.tiny_models import CORPUS

NUM_CONVERSATIONS, NUM_TURNS = 16, 8
# What the tokenizer of the random model was made from, so that a token is some bytes long.
WORDS = " ".join((*CORPUS[:2], CORPUS[4])).split()
# What is simulated: name -> (KV tokens of a replica, shared beginning, mean pause between turns).
CASES = {
    "all fits": (32_768, 0, 4.0),
    "shared beginning of 600": (32_768, 600, 4.0),
    "the same, busy": (32_768, 600, 0.5),
    "a replica holds a quarter": (6_144, 0, 4.0),
}
ARMS = [("prefix", 1), *((p, n) for n in (2, 3) for p in ("prefix", "session", "power_of_two"))]


def simulate(case: str, policy: str, count: int, num_routers: int, seeds: int) -> None:
    """Print the medians over seeds."""
    kv_tokens, shared_tokens, pause_s = CASES[case]
    figures = []
    for seed in range(seeds):
        simulation = Simulation(
            policy, num_replicas=count, num_routers=num_routers, kv_tokens=kv_tokens, seed=seed
        )
        simulation.run(
            conversations(
                NUM_CONVERSATIONS,
                NUM_TURNS,
                seed=seed,
                shared_tokens=shared_tokens,
                pause_s=pause_s,
            )
        )
        wait_s = simulation.first_token_s(0.99)
        figures.append((100 * simulation.hit_rate, simulation.imbalance, wait_s))
    hit, imbalance, wait_s = (statistics.median(f[i] for f in figures) for i in range(3))
    print(
        f"| {case} | {count} | {num_routers} | {policy} | {hit:.1f} % | {imbalance:.2f}"
        f" | {wait_s:.2f} |",
        flush=True,
    )


async def talk(client: httpx.AsyncClient, number: int, num_turns: int) -> list[Answered]:
    """Have one conversation; each turn repeats all that was said before."""
    chance = random.Random(number)
    said, answers = "", []
    for turn in range(num_turns):
        words = " ".join(chance.choices(WORDS, k=chance.randint(40, 120)))
        said += f"\n{number}.{turn}: {words}\n"
        await asyncio.sleep(chance.expovariate(0.5))
        answers.append(await complete(client, said, 24, prompt_cache_key=f"talk {number}"))
        said += answers[-1].text
    return answers


async def talk_all(port: int, num_turns: int) -> list[Answered]:
    """Have all conversations at once."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
        talks = await asyncio.gather(
            *(talk(client, number, num_turns) for number in range(NUM_CONVERSATIONS))
        )
    return [answer for answers in talks for answer in answers]


def measure(num_turns: int, arms: list[tuple[str, int]]) -> None:
    """Run the arms one after another over real replicas, behind a gateway."""
    with checkpoint() as model, ray_serve() as port:
        for policy, count in arms:
            with replicas(model, count, policy=policy, gateway="on"):
                time.sleep(2)
                answers = asyncio.run(talk_all(port, num_turns))
            hit = 100 * sum(a.num_cached for a in answers) / sum(a.num_prompt for a in answers)
            wait_s = quantile([a.first_token_s for a in answers], 0.99)
            print(f"| {count} | {policy} | {hit:.1f} % | {wait_s:.2f} |", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--arms", nargs="*", metavar="POLICY:REPLICAS")
    options = parser.parse_args()
    if options.real:
        pairs = [arm.split(":") for arm in options.arms or ()]
        measure(options.turns, [(policy, int(count)) for policy, count in pairs] or ARMS)
        return
    for case in CASES:
        for policy, count in ARMS:
            for num_routers in (1, 3) if count > 1 else (1,):
                simulate(case, policy, count, num_routers, options.seeds)


if __name__ == "__main__":
    main()
