"""Request many adapters while they are loaded, unloaded, replaced and pinned on 3 replicas.

    python tests/benchmarks/adapter_storm.py [--adapters 200] [--seconds 180] [--calm 120]

Through `remora serve` with a small random model in float32, 8 slots and 32 places in memory at each
replica. Every answer is compared with PEFT's answer for that adapter; a request
during which its adapter is replaced may be answered by the old or the new one. Three phases:
requests for the base model; the same with requests for adapters (Zipf) that stay loaded; the same
with the storm of changes. Prints a row for each phase, then the resources that remain in use.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.deployments.lifecycle.server import REPLICA, Server, make_serve_config, running
from tests.lora.adapters import greedy_ids, make_adapter
from tests.tiny_models import make_tiny_checkpoint

PROMPT = [17, 300, 42, 99, 256, 8, 77]
NUM_TOKENS = 16
ZIPF = 1.0
TARGETS: tuple[Any, ...] = (
    ["q_proj"],
    ["v_proj", "o_proj"],
    "all-linear",
    ["down_proj", "up_proj"],
)
RANKS = (1, 2, 4, 8)
CHANGERS = 4


@dataclass
class Known:
    """An adapter's files and what they make of the prompt."""

    folder: Path
    ids: list[int]


@dataclass
class Name:
    """What is served under a name.

    versions:  what may answer now: the last is served, another may be until its end
    """

    versions: list[Known] = field(default_factory=list)
    is_loaded: bool = False
    changes: int = 0


@dataclass
class Tally:
    """What came of a phase."""

    answers: Counter[str] = field(default_factory=Counter)
    base_s: list[float] = field(default_factory=list)
    adapted_s: list[float] = field(default_factory=list)
    actions: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Storm:
    """Asks and changes."""

    def __init__(self, server: Server, base: list[int], pool: list[Known], num_names: int) -> None:
        self.http = httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits())
        self.base = base
        self.pool = pool
        self.names = {f"a{number}": Name() for number in range(num_names)}
        self.weights = [1 / (place + 1) ** ZIPF for place in range(num_names)]
        self.chance = random.Random(0)
        self.tally = Tally()
        self.pinned: str | None = None
        self.pause_s = 0.01
        self.num_loaded = 0

    async def ask(self, name: str | None) -> None:
        """Ask once, and say what was wrong with the answer."""
        known = None if name is None else self.names[name]
        before = 0 if known is None else known.changes
        was_loaded = known is None or known.is_loaded
        versions = [] if known is None else list(known.versions)  # two while one is being loaded
        body: dict[str, Any] = {
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        began = time.monotonic()
        try:
            answer = await self.http.post(
                "/v1/completions", json=body | ({"model": name} if name else {})
            )
        except httpx.HTTPError as error:
            self.tally.answers["failed"] += 1
            self.tally.faults.append(f"{name}: {error!r}")
            return
        took = time.monotonic() - began
        (self.tally.base_s if known is None else self.tally.adapted_s).append(took)
        has_changed = known is not None and known.changes != before
        versions += [] if known is None else known.versions
        allowed = [self.base] if known is None else [version.ids for version in versions]
        if answer.status_code == 404 and (has_changed or not was_loaded):
            self.tally.answers["unknown, rightly"] += 1
        elif answer.status_code != 200:
            self.tally.answers[f"status {answer.status_code}"] += 1
            self.tally.faults.append(f"{name}: {answer.status_code} {answer.text[:200]}")
        elif answer.json()["choices"][0]["token_ids"] in allowed:
            self.tally.answers["right"] += 1
        else:
            self.tally.answers["WRONG"] += 1
            self.tally.faults.append(f"{name}: wrong tokens; changed meanwhile: {has_changed}")

    async def load(self, name: str, *, replaces: bool = False) -> None:
        """Load under a name, which may be taken."""
        known, chosen = self.names[name], self.chance.choice(self.pool)
        known.changes += 1
        known.versions.append(chosen)
        body = {"lora_name": name, "lora_path": str(chosen.folder), "load_inplace": replaces}
        answer = await self.http.post("/v1/load_lora_adapter", json=body)
        known.changes += 1
        if answer.status_code == 200:
            known.is_loaded = True
            known.versions = [chosen]
            self.num_loaded += 1
        else:
            known.versions.remove(chosen)
            self.tally.faults.append(f"load {name}: {answer.status_code} {answer.text[:200]}")
        self.tally.actions["reload" if replaces else "load"] += 1

    async def unload(self, name: str) -> None:
        """Unload."""
        known = self.names[name]
        known.changes += 1
        known.is_loaded = False
        answer = await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        known.changes += 1
        if answer.status_code != 200:
            self.tally.faults.append(f"unload {name}: {answer.status_code} {answer.text[:200]}")
        self.tally.actions["unload"] += 1

    async def pin(self, name: str) -> None:
        """Pin another adapter than before."""
        if self.pinned is not None:
            await self.http.post(f"/v1/lora_adapters/{self.pinned}/unpin", json={})
        self.pinned = name
        answer = await self.http.post(f"/v1/lora_adapters/{name}/pin", json={})
        if answer.status_code not in (200, 404):
            self.tally.faults.append(f"pin {name}: {answer.status_code} {answer.text[:200]}")
        self.tally.actions["pin"] += 1

    async def change(self, stop: asyncio.Event, mine: list[str]) -> None:
        """Change adapters that no other task changes, one after the other."""
        while True:
            with suppress(TimeoutError):
                pause_s = self.chance.expovariate(1 / self.pause_s)
                await asyncio.wait_for(stop.wait(), pause_s)
                return
            name = self.chance.choice(mine)
            if not self.names[name].is_loaded:
                await self.load(name)
            else:
                match self.chance.choice(("reload", "reload", "unload", "pin")):
                    case "reload":
                        await self.load(name, replaces=True)
                    case "unload":
                        await self.unload(name)
                    case _:
                        await self.pin(name)

    async def phase(
        self, seconds: float, base_rate: float, adapter_rate: float, changers: int
    ) -> Tally:
        """Run one phase; returns what came of it."""
        self.tally = Tally()
        stop = asyncio.Event()
        names = list(self.names)
        shares = [names[place::changers] for place in range(changers)]
        changing = [asyncio.create_task(self.change(stop, share)) for share in shares]
        asked = [
            asyncio.create_task(self._arrivals(seconds, base_rate, lambda: None)),
            asyncio.create_task(
                self._arrivals(
                    seconds, adapter_rate, lambda: self.chance.choices(names, self.weights)[0]
                )
            ),
        ]
        await asyncio.gather(*asked)
        stop.set()
        await asyncio.gather(*changing)
        return self.tally

    async def _arrivals(self, seconds: float, rate: float, choose: Any) -> None:
        until, tasks = time.monotonic() + seconds, list[asyncio.Task[None]]()
        while rate and time.monotonic() < until:
            tasks.append(asyncio.create_task(self.ask(choose())))
            await asyncio.sleep(self.chance.expovariate(rate))
        await asyncio.gather(*tasks)

    async def replicas(self) -> dict[str, Any]:
        """Return each replica's counters."""
        listed = (await self.http.get("/v1/lora_adapters")).json()
        found: dict[str, Any] = listed["replicas"]
        return found


def percentile(values: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return 1000 * statistics.quantiles(values, n=1000)[round(share * 1000) - 1]


def show(name: str, tally: Tally) -> None:
    """Print a row."""
    base, adapted = tally.base_s, tally.adapted_s
    print(
        f"| {name} | {len(base)} | {percentile(base, 0.5):.0f} | {percentile(base, 0.99):.0f} | "
        + (
            f"{len(adapted)} | {percentile(adapted, 0.5):.0f} | {percentile(adapted, 0.99):.0f} | "
            f"{1000 * max(adapted):.0f} | "
            if adapted
            else "0 | | | | "
        )
        + f"{dict(tally.answers)} | {dict(tally.actions)} |",
        flush=True,
    )
    for fault in tally.faults[:10]:
        print(f"  {fault}", flush=True)


def memory_mb(server: Server) -> list[int]:
    """Return what each replica holds for itself."""
    return [round(psutil.Process(pid).memory_full_info().uss / 1e6) for pid in server.pids(REPLICA)]


async def run(server: Server, base: list[int], pool: list[Known], args: argparse.Namespace) -> None:
    """Run the phases."""
    storm = Storm(server, base, pool, args.adapters)
    columns = "phase|base|p50 ms|p99 ms|adapters|p50 ms|p99 ms|max ms|answers|changes"
    print(f"| {columns.replace('|', ' | ')} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    await storm.phase(10, 2, 0, 1)  # warms up, and loads some
    for name in storm.names:
        if not storm.names[name].is_loaded:
            await storm.load(name)
    before = memory_mb(server)
    show("base alone", await storm.phase(args.calm, args.base_rate, 0, 0))
    show("with adapters", await storm.phase(args.calm, args.base_rate, args.rate, 0))
    storm.pause_s = CHANGERS / args.changes
    show("storm", await storm.phase(args.seconds, args.base_rate, args.rate, CHANGERS))
    print(f"  loaded and reloaded by the API, since the start: {storm.num_loaded}")
    for name, counts in (await storm.replicas()).items():
        print(f"  {name}: {counts}")
    for name, known in storm.names.items():
        if known.is_loaded:
            await storm.unload(name)
    for name, counts in (await storm.replicas()).items():
        print(f"  after all were unloaded, {name}: {counts}")
    print(f"  memory of the replicas: {before} MB before, {memory_mb(server)} MB after")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--files", type=int, default=48, help="different adapters behind the names")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--calm", type=float, default=120.0)
    parser.add_argument("--base-rate", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--changes", type=float, default=1.0, help="a second, at most")
    parser.add_argument("--proxy", default="python", choices=("python", "haproxy"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_tiny_checkpoint(folder / "model", "llama", max_position_embeddings=8192)
        pool, base = [], list[int]()
        for number in range(args.files):
            rank = RANKS[number % len(RANKS)]
            settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": TARGETS[number % 4]}
            adapted = make_adapter(
                model, folder / "adapters" / str(number), seed=number, **settings
            )
            ids = greedy_ids(adapted, PROMPT, NUM_TOKENS)
            pool.append(Known(folder / "adapters" / str(number), ids))
            if not base:
                with adapted.disable_adapter():
                    base = greedy_ids(adapted, PROMPT, NUM_TOKENS)
        different = len({tuple(known.ids) for known in pool} | {tuple(base)})
        print(f"{args.files} adapters, {different} different answers, {args.adapters} names")
        config = make_serve_config(
            model,
            parallel={"num_replicas": 3},
            engine={"kv_tokens": 16_384},
            lora={
                "dynamic": True,
                "roots": [str(folder)],
                "max_loras_per_batch": 8,
                "max_lora_rank": 8,
                "max_loaded_loras": 32,
            },
        )
        with running(config, folder, proxy=args.proxy) as server:
            asyncio.run(run(server, base, pool, args))


if __name__ == "__main__":
    main()
