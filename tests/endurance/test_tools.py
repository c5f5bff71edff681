"""The other parts of the tools, without a server of ours: schedule, cuts, growth, reports."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.endurance import chaos, inflict, session
from tests.endurance.chaos_report import Report, Trial, write_json
from tests.endurance.client import End, Seen
from tests.endurance.cut_proxy import Cut, CutProxy
from tests.endurance.oracle import Finding, Reach, Verdict
from tests.endurance.processes import Usage, kind_of, processes_of, usages_of
from tests.endurance.schedule import Kind, faults
from tests.endurance.session import owners
from tests.endurance.soak_verdicts import Sample, Soak
from tests.endurance.statistics import percentile, slope
from tests.endurance.topologies import TOPOLOGIES, Checkpoints

HOUR = 3600.0


def test_a_seed_repeats_its_faults() -> None:
    for topology in (topology for topology in TOPOLOGIES.values() if topology.targets):
        one, again, other = (list(islice(faults(seed, topology), 200)) for seed in (1, 1, 2))

        assert one == again != other
        assert {fault.kind for fault in one} >= {Kind.KILL, Kind.STOP, Kind.CUT, Kind.PAUSE}
        assert {fault.target for fault in one} - {None} == set(topology.targets)
        assert all(fault.reach is Reach.NOTHING for fault in one if fault.kind is Kind.PAUSE)


class SlowServer:
    """Answers with 20 chunks, the last 19 of them once it may go on."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_go_on = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self.num_asked += 1
        for _ in range(20):
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await self.may_go_on.wait()
        writer.write(b"0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("how", Cut)
async def test_a_cut_ends_only_the_chosen_connections(how: Cut) -> None:
    async def get(client: httpx.AsyncClient, rid: str) -> str:
        try:
            return (await client.get("/", headers={"X-Request-Id": rid})).text
        except httpx.TransportError:
            return "closed"

    slow = SlowServer()
    async with (
        await asyncio.start_server(slow.serve, "127.0.0.1", 0) as server,
        CutProxy(server.sockets[0].getsockname()[1]) as proxy,
        httpx.AsyncClient(base_url=proxy.url) as client,
    ):
        both = [asyncio.create_task(get(client, rid)) for rid in ("a", "b")]
        while slow.num_asked < 2:
            await asyncio.sleep(0.01)
        cut = proxy.cut(how, lambda place: place == 1)
        stalling = asyncio.create_task(proxy.stall(0.1))
        slow.may_go_on.set()
        await stalling
        found = [await task for task in both]

    assert cut == {"b"}
    assert found == ["x" * 20, "closed"]


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"hello\n")
    with suppress(ConnectionResetError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("how", Cut)
async def test_a_cut_knows_requests_that_were_just_sent(how: Cut) -> None:
    def request(rid: str) -> None:
        writer.write(f"GET / HTTP/1.1\r\nX-Request-Id: {rid}\r\n\r\n".encode())

    async with (
        await asyncio.start_server(greet, "127.0.0.1", 0) as server,
        CutProxy(server.sockets[0].getsockname()[1]) as proxy,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.listening_on)
        await asyncio.sleep(0.05)
        assert proxy.cut(how, lambda _: True) == set()
        request("a")
        await reader.readline()
        request("b")

        cut = proxy.cut(how, lambda _: True)
        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        await asyncio.sleep(0.05)

    assert cut == {"a", "b"}


@pytest.fixture(params=["127.0.0.1", "::ffff:127.0.0.1"], ids=["IPv4", "mapped"])
def victim(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A process that is connected to this one and repeats what it reads."""
    code = (
        "import socket, sys\n"
        "with socket.create_connection((sys.argv[2], int(sys.argv[1]))) as own:\n"
        "    while data := own.recv(10): own.sendall(data)\n"
        "print('ended', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", code, str(listener.getsockname()[1]), request.param]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5)
                yield process, connection
            process.kill()


async def test_faults_reach_their_process(
    victim: tuple[subprocess.Popen[str], socket.socket],
) -> None:
    process, connection = victim
    pid, own = process.pid, psutil.Process().pid

    async with inflict.stopped(pid, 0.2):
        await asyncio.sleep(0.1)
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    connection.sendall(b"again")
    assert connection.recv(10) == b"again"
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    async with inflict.limited(pid, resource.RLIMIT_FSIZE, 0):
        assert resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] == 0
    assert resource.prlimit(pid, resource.RLIMIT_FSIZE) == before
    assert inflict.num_descriptors(pid) >= 4
    assert inflict.sever(pid, frozenset({pid})) == 0
    assert inflict.sever(pid, frozenset({pid, own})) == 1
    assert process.stdout is not None
    assert process.stdout.readline() == "ended\n"


def test_processes_are_told_apart_and_measured(
    victim: tuple[subprocess.Popen[str], socket.socket],
) -> None:
    assert kind_of(["ray::ServeReplica:remora:LLMServer-m"]) == "replica"
    assert kind_of(["/x/haproxy", "-db"]) == "haproxy"
    assert kind_of(["/x/gcs_server", "--a"]) == "gcs"
    assert kind_of(["ray::IDLE"]) == kind_of([]) == "other of ray"

    usage = {usage.pid: usage for usage in usages_of(victim[0].pid)}[victim[0].pid]
    assert usage.kind == "front"
    assert usage.anonymous_bytes > 1e6
    assert usage.num_descriptors >= 4
    assert usage.num_threads == 1


def test_the_forks_of_a_server_are_told_apart() -> None:
    code = "import os, time\nos.fork() or os.fork() or os.fork()\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            deadline = time.monotonic() + 10
            while len(found := processes_of(process.pid)) < 4 and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            for pid, _ in reversed(found):
                psutil.Process(pid).kill()

    assert [kind for _, kind in found] == ["front", "supervisor", "driver", "other of ray"]


def test_the_log_says_which_process_served_a_request() -> None:
    output = (
        '(ServeReplica:remora:LLMServer pid=12) INFO request {"rid":"r-1","seconds":0.1}\n'
        '\x1b[36m(ServeReplica:remora:LLMServer-m pid=13)\x1b[0m x request {"rid": "r-2"}\n'
        "(ServeReplica:remora:LLMServer pid=12) request {torn\n"
    )
    assert owners(output) == {"r-1": 12, "r-2": 13}


def test_percentiles_and_slopes() -> None:
    assert [percentile(range(1, 101), share) for share in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert slope([(0, 1), (1, 3), (2, 500), (3, 7), (4, 9)]) == pytest.approx(2)
    assert slope([(0, 1)]) == 0


def make_soak(*, per_hour: float = 0.0, late_s: float = 0.1, **facts: object) -> Soak:
    """Return a soak of an hour: a replica of 100 MB that grows by percent, canaries of 0.1 s."""
    samples = [
        Sample(at, [Usage("replica", 7, int(1e8 * (1 + per_hour * at / HOUR / 100)), 9, 3)])
        for at in range(0, int(HOUR), 60)
    ]
    latencies = [(float(at), 0.1 if at < 1800 else late_s) for at in range(0, int(HOUR), 10)]
    soak = Soak(
        seed=1,
        seconds=HOUR,
        samples=samples,
        latencies=latencies,
        verdicts={"whole": 1},
        num_canaries=1,
        wrong=[],
        held={},
        leftovers=[],
    )
    return replace(soak, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("soak", "word"),
    [
        (make_soak(per_hour=5), "grows by"),
        (make_soak(late_s=0.12), "p99"),
        (make_soak(held={"num_held_pages": 3.0}), "num_held_pages is 3"),
        (make_soak(wrong=["short: fox"]), "short: fox"),
        (make_soak(leftovers=["port 1"]), "port 1"),
        (make_soak(latencies=[]), "too few"),
        (
            make_soak(samples=[*make_soak().samples, Sample(HOUR, [])]),
            "replica 7 has ended",
        ),
        (make_soak(samples=[Sample(0, [Usage("raylet", 1, int(9e9), 1, 1)])]), "Ray's own"),
    ],
)
def test_a_soak_fails_for_each_reason(soak: Soak, word: str) -> None:
    assert len(soak.faults) == 1
    assert word in soak.faults[0]


def test_a_soak_within_its_bounds_passes() -> None:
    assert make_soak(per_hour=1.5, late_s=0.105).faults == []
    assert make_soak(per_hour=-9, late_s=0.05).faults == []


def test_a_server_that_does_not_start_fails_its_topology(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(config: object, folder: Path, **_: object) -> None:
        (folder / "output.txt").write_text("first\n" * 50 + "no such device\n")
        raise AssertionError("it has ended")

    monkeypatch.setattr(Checkpoints, "make", lambda folder: Checkpoints(folder, folder, folder))
    monkeypatch.setattr(session, "running", fail)

    report = chaos.run("one", 1, 0.1)

    assert report.faults[0] == "did not run: AssertionError: it has ended"
    assert report.faults[-1] == "no such device"
    assert len(report.faults) < 20
    write_json(tmp_path / "a.json", [report])
    assert "no such device" in (tmp_path / "a.json").read_text()


def test_a_run_fails_for_each_reason() -> None:
    fault = next(faults(1, TOPOLOGIES["one"]))
    seen = Seen("fox", "r-1", 0.0, end=End.COMPLETE)
    good = Report(
        topology="one",
        seed=1,
        trials=[Trial(fault, 1, 6, 0.0, answered_s=1.0, healed_s=2.0)],
        findings=[(seen, Finding(Verdict.WHOLE)), (seen, Finding(Verdict.CLOSED))],
        bodies={},
        held={},
        leftovers=[],
        output="",
    )
    assert good.faults == []
    cases: list[dict[str, Any]] = [
        {"findings": [(seen, Finding(Verdict.SHORT))]},
        {"findings": []},
        {"held": {"num_running": 1.0}},
        {"leftovers": ["process 1"]},
        {"others": ["x"]},
        {"trials": [Trial(fault, 1, 6, 0.0, answered_s=25.0, healed_s=26.0)]},
        {"trials": [Trial(fault, 1, 6, 0.0, answered_s=1.0)]},
    ]
    void = Trial(fault, None, 6, 0.0, is_void=True, answered_s=25.0)
    assert replace(good, trials=[*good.trials, void]).faults == []
    assert replace(good, trials=[*good.trials, void]).recovery_s == [1.0]
    for changes in cases:
        assert len(replace(good, **changes).faults) == 1, changes
