"""Measure the CPU seconds of a server's processes, from its start and from the kill of a rank.

    python -m tests.benchmarks.start.server [--ranks 3] [--kills 1]

Starts the built-in model, and prints the CPU seconds (user and system) of each kind of process once
the server is ready; then kills rank 0 as often as given and prints the CPU seconds until a request
that was sent after the kill had its answer. CPU seconds suffer less from other work on the machine
than wall seconds. Without PYTHONDONTWRITEBYTECODE, or each process compiles the sources.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.benchmarks.ranks.lost_rank import answered
from tests.deployments.lifecycle.server import REPLICA, Server, make_serve_config, running
from tests.endurance.processes import processes_of

MODEL = Path("smollm2-135m-instruct")
PAUSE_S = 3.0

CpuSeconds = Mapping[tuple[int, str], float]


def cpu_seconds(server: Server) -> CpuSeconds:
    """Return the CPU seconds of each process, by pid and kind."""
    found = {}
    for pid, kind in processes_of(server.process.pid):
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[pid, kind] = times.user + times.system
    return found


def rows(what: str, wall_s: float, before: CpuSeconds, after: CpuSeconds) -> list[str]:
    """Return a row for each kind of process; processes that have ended are not counted."""
    by_kind: defaultdict[str, float] = defaultdict(float)
    for process, seconds in after.items():
        by_kind[process[1]] += seconds - before.get(process, 0.0)
    found = [f"| {what}: all | {wall_s:.1f} | {sum(by_kind.values()):.1f} |"]
    most_first = sorted(by_kind.items(), key=lambda item: -item[1])
    return found + [f"| {what}: {kind} | | {spent:.1f} |" for kind, spent in most_first]


def lose_rank_0(server: Server) -> list[str]:
    """Kill rank 0; return the rows until there is an answer again."""
    before = cpu_seconds(server)
    os.kill(server.pids(REPLICA)[-1], signal.SIGKILL)
    wall_s = asyncio.run(answered(server.url))
    return rows("rank 0 killed", wall_s, before, cpu_seconds(server))


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--proxy", default="haproxy")
    args = parser.parse_args()
    config = make_serve_config(MODEL, parallel={"tp_size": args.ranks})
    print("| from ... until ready | wall s | CPU s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with running(config, Path(folder), proxy=args.proxy) as server:
            wall_s = time.monotonic() - began
            print("\n".join(rows("start", wall_s, {}, cpu_seconds(server))), flush=True)
            for _ in range(args.kills):
                time.sleep(PAUSE_S)
                print("\n".join(lose_rank_0(server)), flush=True)


if __name__ == "__main__":
    main()
