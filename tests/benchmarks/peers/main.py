"""The command line: install, serve, offline, measure."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from remora.deployments.bench.machine import busy_warning, describe_machine
from remora.deployments.bench.workloads import OFFLINE, SEED, Workload
from tests.benchmarks.peers import offline
from tests.benchmarks.peers.groups import interrupt_on_sigterm
from tests.benchmarks.peers.install import ensure_installed
from tests.benchmarks.peers.models import model_for
from tests.benchmarks.peers.peers import PEERS, Peer, PeerError
from tests.benchmarks.peers.serving import serve

WORKLOADS = ("decode", "prefill", "batch", "shared-prefix")

console = Console(stderr=True)


def main() -> None:
    args = parser().parse_args()
    interrupt_on_sigterm()
    try:
        args.run(args)
    except PeerError as error:
        console.print(f"[red]{error}", highlight=False)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    root = argparse.ArgumentParser(prog="run.py", description="Other engines, to compare with.")
    commands = root.add_subparsers(required=True, metavar="install|serve|offline|measure")

    install = commands.add_parser("install", help="make the virtual environments that are missing")
    install.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(PEERS))
    install.set_defaults(run=run_install)

    server = commands.add_parser("serve", help="run a peer's OpenAI server in the foreground")
    _add_peer(server)
    server.add_argument("--port", type=int, required=True)
    server.set_defaults(run=run_serve)

    rates = commands.add_parser("offline", help="print the rates of a peer's own API as JSON")
    _add_peer(rates)
    _add_samples(rates)
    rates.set_defaults(run=run_offline)

    every = commands.add_parser("measure", help="offline rates of every peer, as a table and JSON")
    every.add_argument("--threads", type=int, default=2)
    every.add_argument("--out", type=Path, help="where the record goes")
    _add_samples(every)
    every.set_defaults(run=run_measure)
    return root


def _add_peer(command: argparse.ArgumentParser) -> None:
    command.add_argument("peer", choices=PEERS)
    command.add_argument("--model", type=Path, help="a folder; for llama.cpp a GGUF file")
    command.add_argument("--quant", help="bf16; for llama.cpp also q8_0 and q4_1")
    command.add_argument("--threads", type=int, default=2)


def _add_samples(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workload", default=",".join(WORKLOADS), help="comma-separated")
    command.add_argument("--samples", type=int, default=3)
    command.add_argument("--seed", type=int, default=SEED)


def run_install(args: argparse.Namespace) -> None:
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        raise PeerError(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    for name in args.peers or PEERS:
        ensure_installed(PEERS[name])


def run_serve(args: argparse.Namespace) -> None:
    peer = PEERS[args.peer]
    ensure_installed(peer)
    serve(peer, _model(args, peer), port=args.port, threads=args.threads)


def run_offline(args: argparse.Namespace) -> None:
    peer = PEERS[args.peer]
    ensure_installed(peer)
    figures, crashes = offline.measure(
        peer,
        _model(args, peer),
        _workloads(args.workload),
        threads=args.threads,
        samples=args.samples,
        seed=args.seed,
    )
    for workload, crash in crashes.items():
        sys.stderr.write(f"{workload}: {crash}\n")
    sys.stdout.write(json.dumps(figures) + "\n")


def run_measure(args: argparse.Namespace) -> None:
    for peer in PEERS.values():
        ensure_installed(peer)
    workloads = _workloads(args.workload)
    busy = busy_warning()
    table = Table("peer", "weights", *(workload.name for workload in workloads))
    results: dict[str, Any] = {}
    for peer in PEERS.values():
        for quant in peer.quants:
            figures, crashes = offline.measure(
                peer,
                model_for(peer, quant),
                workloads,
                threads=args.threads,
                samples=args.samples,
                seed=args.seed,
            )
            results[f"{peer.name} {quant}"] = figures | {
                workload: {"crash": crash} for workload, crash in crashes.items()
            }
            cells = (
                crashes.get(workload.name) or f"{next(iter(figures[workload.name].values())):.0f}"
                for workload in workloads
            )
            table.add_row(peer.name, quant, *cells)
    Console().print(table)
    if args.out:
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
            "machine": describe_machine(),
            "busy": busy,
            "threads": args.threads,
            "samples": args.samples,
            "packages": {name: _packages(peer) for name, peer in PEERS.items()},
            "figures": results,
        }
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _packages(peer: Peer) -> list[str]:
    lines = peer.requirements.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def _model(args: argparse.Namespace, peer: Peer) -> Path:
    return args.model or model_for(peer, args.quant or peer.quants[0])


def _workloads(names: str) -> Sequence[Workload]:
    wrong = set(names.split(",")) - set(WORKLOADS)
    if wrong:
        raise PeerError(f"no workload {', '.join(sorted(wrong))}; there are {', '.join(WORKLOADS)}")
    return [OFFLINE[name] for name in names.split(",")]


if __name__ == "__main__":
    main()
