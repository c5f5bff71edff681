"""How often adapters are loaded behind three replicas that hold a quarter of them each.

    python tests/benchmarks/adapter_routing.py [--seeds 3] [--calls 600]

On a virtual clock, with the real scheduler, ledger and policies: 60 adapters, of which the nth is
asked for 1/n as often, replicas that hold 16, and 0.3 s for a load. Prints for each policy the
loads per 1,000 requests (in brackets what no policy can be below: each adapter that is asked for is
loaded once), quantiles of the time to the first token, and how unevenly the work was spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, not by pytest

from tests.deployments.routing.loads import adapter_load
from tests.deployments.routing.simulation import Simulation

NUM_REPLICAS, NUM_ADAPTERS, NUM_HELD = 3, 60, 16
POLICIES = ("lora", "power_of_two", "shortest_queue")
# What is simulated: name -> (requests a second, share of them for one adapter).
CASES = {
    "8/s": (8.0, 0.0),
    "14/s": (14.0, 0.0),
    "14/s, half of them for one adapter": (14.0, 0.5),
    "14/s, all of them for one adapter": (14.0, 1.0),
}


def simulate(case: str, policy: str, num_routers: int, num_calls: int, seeds: int) -> None:
    """Print the medians over seeds."""
    rate, hot_share = CASES[case]
    figures = []
    for seed in range(seeds):
        simulation = Simulation(
            policy,
            num_replicas=NUM_REPLICAS,
            num_routers=num_routers,
            max_adapters=NUM_HELD,
            seed=seed,
        )
        simulation.run(
            adapter_load(num_calls, rate, seed=seed, num_adapters=NUM_ADAPTERS, hot_share=hot_share)
        )
        figures.append(
            (
                1000 * simulation.num_loads / num_calls,
                1000 * len({call.adapter for call in simulation.finished}) / num_calls,
                simulation.first_token_s(0.5),
                simulation.first_token_s(0.99),
                simulation.imbalance,
            )
        )
    loads, least, p50_s, p99_s, imbalance = map(statistics.median, zip(*figures, strict=True))
    print(
        f"| {case} | {num_routers} | {policy} | {loads:.0f} ({least:.0f}) | {p50_s:.2f}"
        f" | {p99_s:.2f} | {imbalance:.2f} |",
        flush=True,
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=600)
    options = parser.parse_args()
    for case in CASES:
        for num_routers in (1, 3):
            for policy in POLICIES:
                simulate(case, policy, num_routers, options.calls, options.seeds)


if __name__ == "__main__":
    main()
