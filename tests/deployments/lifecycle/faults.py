"""Fault injection: faults of a server under load, and their allowed effects.

A fault names the process, the signal, and the streams that may fail. The procedure is the same for
all: streams run, the signal is sent, the server recovers, and every stream gets a verdict.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.deployments.lifecycle.leftovers import belongings, until_gone
from tests.deployments.lifecycle.load import Load, Stream, Verdict
from tests.deployments.lifecycle.rolling import (
    Change,
    change_under_load,
    with_resumption,
    with_user_config,
)
from tests.deployments.lifecycle.server import (
    CONTROLLER,
    GATEWAY,
    HAPROXY,
    PROXY,
    REPLICA,
    ROUTING_SERVICE,
    WORKER,
    Server,
    kill,
    make_serve_config,
)

STREAMS = range(6)
# Ranks on a CPU are slow.
NUM_TOKENS = {"python": 150, "haproxy": 600}
LULL_S = 0.3


class Breaks(Enum):
    """Which streams may fail."""

    NONE = "none"
    SOME = "those on it"  # other streams run and succeed
    WHOEVER = "those on it, if any"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    title:  start of the process's command line; the oldest such process gets the signal
    """

    name: str
    title: str
    breaks: Breaks
    number: int = signal.SIGKILL


# With Serve's Python proxy, ranks and a gateway.
PYTHON_FAULTS = (
    Fault("replica (rank 0) killed", REPLICA, Breaks.SOME),
    Fault("rank 1 killed", WORKER, Breaks.SOME),
    Fault("rank 1 stopped", WORKER, Breaks.SOME, signal.SIGSTOP),
    Fault("controller killed", CONTROLLER, Breaks.NONE),
    Fault("gateway killed", GATEWAY, Breaks.ALL),
    Fault("proxy killed", PROXY, Breaks.ALL),
)
# With HAProxy and a routing service. Just after the start, it may know only one replica.
HAPROXY_FAULTS = (
    Fault("routing service killed", ROUTING_SERVICE, Breaks.NONE),
    Fault("controller killed", CONTROLLER, Breaks.NONE),
    Fault("fallback proxy killed", PROXY, Breaks.NONE),
    Fault("HAProxy killed", HAPROXY, Breaks.ALL),
    Fault("replica killed", REPLICA, Breaks.WHOEVER),
)
_TITLES = (REPLICA, WORKER, GATEWAY, ROUTING_SERVICE, PROXY, CONTROLLER, HAPROXY)


def make_config(model: Path, proxy: str) -> dict[str, Any]:
    """Return the Serve config of two replicas for the faults of a proxy."""
    if proxy == "haproxy":
        policy = {"policy": "shortest_queue"}
        return make_serve_config(model, parallel={"num_replicas": 2}, routing=policy)
    return make_serve_config(
        model,
        parallel={"num_replicas": 2, "tp_size": 2},
        engine={"step_timeout_s": 3.0},
        # Repeated requests would be blamed for the crashes of replicas.
        routing={"gateway": "on", "max_crashes": 100},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The effects of a fault. Seconds count from the signal.

    felt_s:      until the first stream failed; None = none did
    detected_s:  until Serve no longer listed the process as running; None = Serve does not list it
    answered_s:  until a later request succeeded
    healed_s:    until all previous processes ran again
    """

    fault: str
    felt_s: float | None
    detected_s: float | None
    answered_s: float
    healed_s: float
    num_running: int
    verdicts: dict[str, int]
    wrong: list[str]
    unharmed: int

    def row(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


async def commit(fault: Fault, server: Server, load: Load, *, timeout_s: float = 90.0) -> Report:
    """Do it while streams run; return when everything works again."""
    load.streams.clear()
    over = asyncio.Event()
    work = asyncio.create_task(load.keep_up(STREAMS, over))
    victim = 0
    try:
        async with asyncio.timeout(30):
            while len(load.running) < len(STREAMS):
                await asyncio.sleep(0.02)
        before, named = census(server), server.pids(fault.title)
        assert named, f"nobody is called {fault.title}"
        victim, running = named[0], list(load.running)
        at = time.monotonic()
        kill(victim, fault.number)
        answer = asyncio.create_task(_first_answer(server, at))
        detected_s = await asyncio.to_thread(_detected, server, fault, victim, timeout_s)
        is_back = _healed(server, victim, before)
        await asyncio.to_thread(server.until, is_back, timeout_s)
        healed_s = time.monotonic() - at
        answered_s = await answer
        await asyncio.sleep(LULL_S)
    finally:
        if victim and fault.number == signal.SIGSTOP:
            kill(victim, signal.SIGCONT)
        over.set()
        await work
    return _report(fault, load, at, running, detected_s, answered_s, healed_s)


def _report(
    fault: Fault,
    load: Load,
    at: float,
    running: list[Stream],
    detected_s: float | None,
    answered_s: float,
    healed_s: float,
) -> Report:
    failed = [s for s in load.streams if s.verdict in (Verdict.BROKEN, Verdict.REFUSED)]
    felt = min((s.ended_at - at for s in failed if s.ended_at and s.ended_at > at), default=None)
    return Report(
        fault=fault.name,
        felt_s=felt,
        detected_s=detected_s,
        answered_s=answered_s,
        healed_s=healed_s,
        num_running=len(running),
        verdicts=dict(load.verdicts()),
        wrong=[f"{s.number}: {s.error}" for s in load.streams if s.verdict is Verdict.WRONG],
        unharmed=sum(s.verdict is Verdict.WHOLE for s in running),
    )


def _detected(server: Server, fault: Fault, victim: int, timeout_s: float) -> float | None:
    if fault.title != REPLICA:
        return None

    def is_given_up() -> bool:
        return all(r["pid"] != victim or r["state"] != "RUNNING" for r in server.replicas())

    return server.until(is_given_up, timeout_s)


async def try_fault(fault: Fault, server: Server, load: Load) -> Report:
    """Do it, and check that it costs no more than it may."""
    report = await commit(fault, server, load)

    broken = [s for s in load.streams if s.verdict is Verdict.BROKEN]
    assert report.wrong == []
    assert len(broken) <= report.num_running, broken
    if fault.breaks is Breaks.NONE:
        assert report.verdicts.keys() == {"whole"}, broken
    if fault.breaks is Breaks.SOME:
        assert 0 < report.unharmed < report.num_running, report
    return report


async def try_change(server: Server, load: Load, config: Mapping[str, Any]) -> Change:
    """Deploy another config under load, and check that no stream has suffered."""
    change = await change_under_load(server, load, config, num_streams=30, per_second=6.0)

    assert change.failures == []
    assert change.verdicts == {"whole": 30}
    assert change.peak_running > 1
    return change


def try_user_config(server: Server) -> None:
    """Change what running replicas do, try what they must refuse, and take both back."""
    before = census(server), server.pids(REPLICA)

    def all_answer(status: int) -> bool:
        body = {"prompt": "a", "n": 3, "max_tokens": 1}
        url = f"{server.url}/v1/completions"
        return {httpx.post(url, json=body, timeout=30).status_code for _ in range(12)} == {status}

    def refused() -> str:
        return str(httpx.get(f"{server.url}/server_info", timeout=30).json()["user_config_refused"])

    assert all_answer(200)
    server.deploy(with_user_config(server.config, limits={"max_n": 2}))
    server.until(lambda: server.is_settled() and all_answer(400), 60)
    server.deploy(with_user_config(server.config, limits={"max_n": 9}, engine={"page_size": 8}))
    server.until(lambda: "cannot change while a replica runs" in refused(), 60)
    server.until(lambda: server.is_settled() and all_answer(400), 60)
    server.deploy(with_user_config(server.config))
    server.until(lambda: server.is_settled() and all_answer(200), 60)
    assert (census(server), server.pids(REPLICA)) == before


async def try_resumption(server: Server, load: Load) -> None:
    """Kill a replica behind a gateway that resumes: its streams go on, every token once."""
    before = {*server.pids(REPLICA), *server.pids(GATEWAY)}
    server.deploy(with_resumption(server.config))

    def is_replaced() -> bool:
        # Serve begins a change some time after it was accepted, so "settled" may be the old state.
        now = {*server.pids(REPLICA), *server.pids(GATEWAY)}
        return not before & now and server.is_settled() and "remora_gateway_" in _metrics(server)

    server.until(is_replaced, 120)
    async with _under_way(load):
        kill(server.pids(REPLICA)[0], signal.SIGKILL)

    assert load.verdicts() == {"whole": len(STREAMS)}, load.streams
    resumed = re.search(r"^remora_gateway_resumed_total\{.*\} (\d+)", _metrics(server), re.M)
    assert resumed is not None
    assert int(resumed[1]) > 0


async def try_signal(server: Server, load: Load) -> None:
    """Stop the server amid streams: they end whole, and nothing is left of it."""
    server.until(server.is_settled, 120)
    found = belongings([server.process.pid])

    async with _under_way(load):
        code = await asyncio.to_thread(server.stop)

    assert code == 0, server.says()
    assert load.verdicts() == {"whole": len(STREAMS)}, load.streams
    assert "Traceback" not in server.says().split("stopping: waiting")[-1]
    assert until_gone(found.left) == []


@asynccontextmanager
async def _under_way(load: Load) -> AsyncIterator[None]:
    """Do something while all streams answer; then let them end."""
    try:
        async with asyncio.timeout(60):
            while True:
                load.streams.clear()
                streams = asyncio.gather(*(load.stream(number) for number in STREAMS))
                while len(load.running) < len(STREAMS) and not streams.done():
                    await asyncio.sleep(0.02)
                if not streams.done():
                    break  # or one had ended before another began: try again
    except TimeoutError:
        pytest.fail(f"the streams never ran all at once: {load.streams}")
    yield
    await streams


def _metrics(server: Server) -> str:
    return httpx.get(f"{server.url}/metrics", timeout=30).text


def census(server: Server) -> Counter[str]:
    """Count the server's processes of each kind."""
    return Counter({title: len(server.pids(title)) for title in _TITLES})


def _healed(server: Server, victim: int, before: Counter[str]) -> Callable[[], bool]:
    """Return what asks whether there are as many of all kinds as before, and they serve."""

    def is_healed() -> bool:
        return (
            not psutil.pid_exists(victim)
            and census(server) == before
            and server.is_settled()
            and httpx.get(f"{server.url}/health", timeout=5).is_success
        )

    return is_healed


async def _first_answer(server: Server, at: float) -> float:
    """Ask again and again from now on; return when the first answer came."""
    body = {"prompt": "a", "max_tokens": 1}
    async with httpx.AsyncClient(timeout=60) as client, asyncio.timeout(90):
        while True:
            with suppress(httpx.TransportError):
                response = await client.post(f"{server.url}/v1/completions", json=body)
                if response.status_code == 200:
                    return time.monotonic() - at
            await asyncio.sleep(0.05)
