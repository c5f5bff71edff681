"""A server of its own with clients at work, for soak and chaos alike."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.deployments.lifecycle.leftovers import Belongings, belongings, until_gone
from tests.deployments.lifecycle.server import Server, running
from tests.endurance.client import End, Seen, perform
from tests.endurance.oracle import Answer
from tests.endurance.processes import processes_of
from tests.endurance.topologies import ADAPTERS, GUEST, Checkpoints, Topology
from tests.endurance.traffic import Ask

TIMEOUT_S = 60.0
SETTLE_S = 20.0
# The log of a request, as Ray passes it on: (ServeReplica:remora:LLMServer pid=123) ... request {.}
_OWNER = re.compile(r"pid=(\d+)\).*?\brequest (\{.*\})")
_HELD = re.compile(r"^remora_(num_held_pages|num_running|num_waiting)\{[^}]*\} (\S+)", re.MULTILINE)


_OUTLIVING = ("ray", "torchinductor_")


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is TMPDIR for what is started within the block; remove it afterwards.

    Its name is short: it becomes part of the paths of Unix sockets.
    """
    folder = Path(tempfile.mkdtemp(prefix="end-", dir="/tmp"))
    (folder / "t").mkdir()
    given = {"TMPDIR": str(folder / "t"), "RAY_DEDUP_LOGS": "0"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield folder
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class Clients:
    """Clients that repeat requests.

    url:   where they send them
    seen:  every request that has ended
    """

    url: str
    prefix: str
    seen: list[Seen] = field(default_factory=list)
    num_running: int = 0
    _count: int = 0
    _client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        timeout = httpx.Timeout(TIMEOUT_S + 10)
        self._client = httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._client is not None
        await self._client.aclose()

    async def send(self, ask: Ask, *, leaves_after: int | None = None) -> Seen:
        """Send one request and remember what was seen."""
        assert self._client is not None
        self._count += 1
        rid = f"{self.prefix}-{self._count}"
        self.num_running += 1
        try:
            seen = await perform(
                self._client, ask, rid, timeout_s=TIMEOUT_S, leaves_after=leaves_after
            )
        finally:
            self.num_running -= 1
        self.seen.append(seen)
        return seen

    async def repeat(
        self,
        asks: Sequence[Ask],
        chance: random.Random,
        until: asyncio.Event,
        *,
        leaving: float = 0.0,
        pause_s: float = 0.0,
    ) -> None:
        """Send requests one after another until the event is set.

        leaving:  share of requests whose client leaves early
        pause_s:  between two requests, at most
        """
        while not until.is_set():
            leaves = chance.randrange(30) if chance.random() < leaving else None
            seen = await self.send(chance.choice(asks), leaves_after=leaves)
            if seen.end is not End.COMPLETE or seen.status != 200:
                await asyncio.sleep(0.2)  # as a client that backs off
            if pause_s:
                await asyncio.sleep(chance.uniform(0, pause_s))


async def learn(url: str, asks: Sequence[Ask]) -> dict[str, Answer]:
    """Return the right answers: each request is sent alone, and again among the others.

    Raises AssertionError if an answer is not complete, or depends on its company.
    """
    async with Clients(url, "learn") as clients:
        alone = {ask.name: await clients.send(ask) for ask in asks}
        together = await asyncio.gather(*(clients.send(ask) for ask in asks))
    for ask, again in zip(asks, together, strict=True):
        seen = alone[ask.name]
        assert seen.end is End.COMPLETE, seen
        assert seen.status == ask.status, seen
        if ask.status == 200:
            assert Answer.of(seen) == Answer.of(again), (seen, again)
    return {ask.name: Answer.of(alone[ask.name]) for ask in asks if ask.status == 200}


async def load_adapters(
    url: str, checkpoints: Checkpoints, names: Sequence[str] = (*ADAPTERS, GUEST)
) -> None:
    """Load adapters of the model `m` into a running server."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for name in names:
            path = str(checkpoints.adapter(name))
            body = {"model": "m", "lora_name": name, "lora_path": path}
            answer = await client.post(f"{url}/v1/load_lora_adapter", json=body)
            assert answer.status_code == 200, answer.text


async def keep_changing_adapters(
    url: str, checkpoints: Checkpoints, until: asyncio.Event, *, period_s: float = 0.5
) -> None:
    """Unload and load the adapter GUEST again and again. Refusals are no fault of its own."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        load = {"model": "m", "lora_name": GUEST, "lora_path": str(checkpoints.adapter(GUEST))}
        while not until.is_set():
            for path, body in (
                ("/v1/unload_lora_adapter", {"model": "m", "lora_name": GUEST}),
                ("/v1/load_lora_adapter", load),
            ):
                with suppress(httpx.TransportError):
                    await client.post(path, json=body)
                await asyncio.sleep(period_s)


def owners(output: str) -> dict[str, int]:
    """Return the process that reported each request, from a server's output."""
    found = {}
    for pid, line in _OWNER.findall(output):
        try:
            found[str(json.loads(line)["rid"])] = int(pid)
        except (ValueError, KeyError):
            continue
    return found


async def held_at_idle(url: str, timeout_s: float = SETTLE_S) -> dict[str, float]:
    """Return what replicas hold although no request runs, after a while; {} is right.

    Without a gateway each answer is of some replica, so several are asked.
    """
    deadline = time.monotonic() + timeout_s
    async with httpx.AsyncClient(timeout=10) as client:
        while True:
            held: dict[str, float] = {}
            for _ in range(8):
                text = (await client.get(f"{url}/metrics")).text
                for name, value in _HELD.findall(text):
                    held[name] = max(held.get(name, 0.0), float(value))
            held = {name: value for name, value in held.items() if value}
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.5)


@asynccontextmanager
async def serving(
    topology: Topology, checkpoints: Checkpoints, folder: Path
) -> AsyncIterator[Server]:
    """Run the topology's server within the block."""
    config = topology.config(checkpoints)
    with running(config, folder, proxy=topology.proxy) as server:
        if topology.has_adapters:
            await load_adapters(server.url, checkpoints)
        yield server


def output_in(folder: Path) -> str:
    """Return the output of the server that ran last with this folder."""
    path = folder / "output.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def census(server: Server) -> Mapping[str, int]:
    """Count the processes that serve, by kind."""
    counts: dict[str, int] = {}
    for _, kind in processes_of(server.process.pid):
        if kind != "other of ray":
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def pids_of(server: Server, kind: str) -> list[int]:
    """Return the processes of a kind, the oldest first."""
    return [pid for pid, found in processes_of(server.process.pid) if found == kind]


def stop_and_list_leftovers(server: Server, folder: Path) -> list[str]:
    """Stop a server; return what is left of it."""
    found = belongings([server.process.pid])
    try:
        code = server.stop()
    except subprocess.TimeoutExpired as error:
        return [f"all: {error}"]
    left = list_leftovers(found, server, folder)
    return [f"exit code {code}", *left] if code else left


def list_leftovers(found: Belongings, server: Server, folder: Path) -> list[str]:
    """Return what is left of a server that has ended: processes, ports, files."""
    port = server.config["http_options"]["port"]
    found |= Belongings(ports=frozenset({port}))

    def left() -> list[str]:
        # Ray's logs and compiled code outlive a run.
        own = [p for p in (folder / "t").iterdir() if not p.name.startswith(_OUTLIVING)]
        files = [f"file {path}" for path in sorted(own)]
        return [*found.left(), *files]

    return until_gone(left)
