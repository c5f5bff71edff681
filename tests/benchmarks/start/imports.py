"""Measure the CPU seconds that the processes of a server take to import their modules.

    python -m tests.benchmarks.start.imports [--repeats 5]

Each role runs in a process of its own; a row has the least CPU seconds (user and system) of all
repeats, which are the least disturbed by other work on the machine. Bytecode is written, as an
installed package has it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_REMORA = str(Path(sys.executable).with_name("remora"))
_REPLICA = "import ray, remora.deployments.llm_server"

# What each process runs until it has its modules.
ROLES: Mapping[str, Sequence[str]] = {
    "Python alone": ("-c", "pass"),
    "configuration": ("-c", "import remora.configs.load"),
    "remora --help": (_REMORA, "--help"),
    "remora config check": (_REMORA, "config", "check", "configs/smollm2.yaml"),
    "remora serve, before Ray": ("-c", "import remora.deployments.cli.serve"),
    "ray": ("-c", "import ray"),
    "ray.serve": ("-c", "import ray.serve"),
    "torch": ("-c", "import torch"),
    "build of an application": ("-c", "import ray, remora.deployments.app"),
    "gateway": ("-c", "import ray, remora.deployments.gateway.gateway"),
    "routing service": ("-c", "import ray, remora.deployments.routing.routing_service"),
    "LoRA manager": ("-c", "import ray, remora.deployments.adapters.manager"),
    "replica, without the engine": ("-c", _REPLICA),
    "replica": ("-c", f"{_REPLICA}, remora.engine.launch"),
    "rank": (
        "-c",
        "import ray, remora.deployments.ranks.worker, remora.engine.launch",
    ),
}


def cpu_seconds(arguments: Sequence[str]) -> float:
    """Run Python; return the CPU seconds of the process. Raises CalledProcessError."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *arguments]
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="roles whose name contains this")
    args = parser.parse_args()
    print("| process | CPU s |\n|---|---|")
    for role, command in ROLES.items():
        if args.only in role:
            least = min(cpu_seconds(command) for _ in range(args.repeats))
            print(f"| {role} | {least:.2f} |", flush=True)


if __name__ == "__main__":
    main()
