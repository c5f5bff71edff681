"""Measure how long a process failure takes to be felt, detected and healed, for each process kind.

    python tests/benchmarks/faults.py [--proxy haproxy] [--json FILE]

Streams run all the while (six at a time, greedy); each row is one run. `felt` is when the first
stream failed, `found` when Serve no longer counted on a replica, `answered` when a request that
came afterwards had its answer, `healed` when everything ran again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.deployments.lifecycle.faults import (
    HAPROXY_FAULTS,
    NUM_TOKENS,
    PYTHON_FAULTS,
    STREAMS,
    Breaks,
    Fault,
    Report,
    commit,
    make_config,
)
from tests.deployments.lifecycle.load import Load
from tests.deployments.lifecycle.server import REPLICA, Server, running
from tests.tiny_models import make_tiny_checkpoint

# Not one of the tests' faults: it needs no action of the test.
ASKED = Fault("replica sent SIGTERM", REPLICA, Breaks.SOME, signal.SIGTERM)


def row(proxy: str, report: Report) -> str:
    """Return a report as a row of the table."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    times = (report.felt_s, report.detected_s, report.answered_s, report.healed_s)
    outcome = ", ".join(f"{number} {kind}" for kind, number in sorted(report.verdicts.items()))
    unharmed = f"{report.unharmed} of {report.num_running}"
    return (
        f"| {proxy} | {report.fault} | {' | '.join(map(seconds, times))} | {unharmed} | {outcome} |"
    )


async def measure(server: Server, proxy: str) -> list[Report]:
    """Do everything to the server that is done behind this proxy."""
    reports = []
    async with Load(server.url, NUM_TOKENS[proxy]) as load:
        await load.learn(STREAMS)
        for fault in (*(HAPROXY_FAULTS if proxy == "haproxy" else PYTHON_FAULTS), ASKED):
            reports.append(await commit(fault, server, load))
            print(row(proxy, reports[-1]), flush=True)
    return reports


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proxy", default="python", choices=("python", "haproxy"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("| proxy | fault | felt | found | answered | healed | unharmed | streams in all |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_checkpoint(Path(folder) / "model", "llama", max_position_embeddings=8192)
        with running(make_config(model, args.proxy), Path(folder), proxy=args.proxy) as server:
            reports = asyncio.run(measure(server, args.proxy))
    if args.json is not None:
        args.json.write_text(json.dumps([report.row() for report in reports], indent=2))


if __name__ == "__main__":
    main()
