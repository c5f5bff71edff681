"""Ranks that exchange tensors over sockets, as threads, and what happens when one is gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import remora.engine.parallel.connect
from remora.configs.errors import EngineError
from remora.deployments.free_ports import free_port
from remora.engine.parallel.connect import connect, listen
from remora.engine.parallel.group import ALONE
from remora.engine.parallel.layout import Layout
from tests.engine.parallel.ranks import HOST, Threads, connected

LOCALHOST = "0100007F"  # as the kernel writes it
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(12, dtype=dtype).view(3, 4) + 100 * rank


@pytest.fixture(params=["exchanged", "in a ring"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are made in two ways, by their size."""
    if request.param == "in a ring":
        monkeypatch.setattr("remora.engine.parallel.connect.EXCHANGE_BYTES", -1)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_of_a_stage_sum_among_themselves(dtype: torch.dtype) -> None:
    with connected(2, 2) as (threads, groups):
        sums = threads.on_all(lambda rank: groups[rank].all_reduce(values_of(rank, dtype)))

    assert torch.equal(sums[0], values_of(0, dtype) + values_of(1, dtype))
    assert torch.equal(sums[3], values_of(2, dtype) + values_of(3, dtype))
    assert torch.equal(sums[0], sums[1])
    assert sums[0].dtype == dtype


@pytest.mark.usefixtures("ways")
def test_a_sum_is_made_in_place_also_where_memory_has_gaps() -> None:
    with connected(3) as (threads, groups):
        whole = [values_of(rank) for rank in range(3)]
        returned = threads.on_all(lambda rank: groups[rank].all_reduce(whole[rank][:, ::2]))

    expected = sum((values_of(rank) for rank in range(3)), torch.zeros(3, 4))
    for rank in range(3):
        assert returned[rank].data_ptr() == whole[rank].data_ptr()
        assert torch.equal(whole[rank][:, ::2], expected[:, ::2])
        assert torch.equal(whole[rank][:, 1::2], values_of(rank)[:, 1::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_rank_sends_to_any_other_into_memory_of_any_stride(dtype: torch.dtype) -> None:
    with connected(2, 2) as (threads, groups):
        memory = torch.zeros(3, 8, dtype=dtype)

        def exchange(rank: int) -> None:
            if rank == 3:
                groups[3].send(values_of(7, dtype).T.contiguous().T, 0)
            if rank == 0:
                groups[0].receive(memory[:, ::2], 3)

        threads.on_all(exchange)

    assert torch.equal(memory[:, ::2], values_of(7, dtype))
    assert not memory[:, 1::2].any()


def test_stages_of_one_rank_have_nothing_to_sum_and_one_rank_nothing_to_join() -> None:
    with connected(1, 2) as (threads, groups):
        values = values_of(0)
        assert threads.on_all(lambda rank: groups[rank].all_reduce(values))[0] is values

    alone = connect(Layout(), host="nowhere", port=1, listener=None, device="cpu", timeout_s=0.1)
    assert alone is ALONE


def test_a_rank_that_does_not_come_is_named() -> None:
    listener = listen(HOST)  # before any rank looks for it, as in an engine
    port = listener.getsockname()[1]

    def join(rank: int) -> str:
        with pytest.raises(EngineError) as caught:
            connect(
                Layout(rank=rank, tp_size=3),
                host=HOST,
                port=port,
                listener=listener if rank == 0 else None,
                device="cpu",
                timeout_s=1.0,
            )
        return str(caught.value)

    with closing(Threads(2)) as threads:
        errors = threads.on_all(join)

    assert "waited 1 s for rank 2" in errors[0]
    assert "rank 1" in errors[1]


def test_a_host_that_is_not_there_is_an_engine_error() -> None:
    layout, port = Layout(rank=1, tp_size=2), free_port()

    with pytest.raises(EngineError, match=f"did not meet the others at {HOST}:{port}"):
        connect(layout, host=HOST, port=port, listener=None, device="cpu", timeout_s=0.3)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("leaving", [0, 2])
def test_a_rank_that_leaves_fails_the_others_at_once(leaving: int) -> None:
    with connected(3, timeout_s=60) as (threads, groups):

        def sum_or_leave(rank: int) -> None:
            if rank == leaving:
                groups[rank].close()
                return
            with pytest.raises(EngineError, match=f"rank {rank} of 3 could not sum .*: Connection"):
                groups[rank].all_reduce(values_of(rank))

        threads.on_all(sum_or_leave)


@pytest.mark.usefixtures("ways")
def test_a_rank_that_could_not_sum_leaves_so_that_no_other_waits_for_it() -> None:
    with connected(3, timeout_s=60) as (threads, groups):
        waits, left = threading.Event(), threading.Event()

        def sum_in_turns(rank: int) -> None:
            if rank == 0:  # finds rank 2 gone before it has sent anything to rank 1
                assert left.wait(10)
                time.sleep(0.2)
            if rank == 1:
                waits.set()
            if rank == 2:
                assert waits.wait(10)
                time.sleep(0.2)
                groups[rank].close()
                left.set()
                return
            with pytest.raises(EngineError, match=f"rank {rank} of 3 could not sum .*: Connection"):
                groups[rank].all_reduce(values_of(rank))

        threads.on_all(sum_in_turns)


@pytest.mark.usefixtures("ways")
def test_a_rank_that_hangs_fails_the_others_after_the_time_limit() -> None:
    with connected(2, timeout_s=3) as (threads, groups):  # which also the meeting has to keep

        def sum_or_hang(rank: int) -> None:
            if rank == 0:
                with pytest.raises(EngineError, match=r"rank 0 of 2 could not sum .*: Timed out"):
                    groups[0].all_reduce(values_of(0))

        threads.on_all(sum_or_hang)


def test_leaving_twice_is_leaving_once_and_there_is_no_way_back() -> None:
    with connected(2) as (_, groups):
        groups[0].close()
        groups[0].close()

        with pytest.raises(EngineError, match="has left"):
            groups[0].all_reduce(values_of(0))


def test_nothing_is_left_of_a_group_that_was_closed() -> None:
    with connected(2, 2):  # what the first one starts for good is not counted
        pass
    before = count_threads_and_sockets()

    for _ in range(3):
        with connected(2, 2):
            assert count_threads_and_sockets() > before

    for _ in range(400):
        if count_threads_and_sockets() <= before:
            break
        time.sleep(0.05)
    assert count_threads_and_sockets() <= before


def test_ranks_listen_on_the_given_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before, meeting = listening(), set[str]()

    def look_and_meet(*args: Any) -> None:
        meeting.update(listening() - before)
        meet(*args)

    meet = remora.engine.parallel.connect._meet
    monkeypatch.setattr("remora.engine.parallel.connect._meet", look_and_meet)
    with connected(2):
        joined = listening() - before

    assert {place.rpartition(":")[0] for place in meeting} == {LOCALHOST}
    assert {place.rpartition(":")[0] for place in joined} == {LOCALHOST}


def test_nobody_comes_in_once_all_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr("tests.engine.parallel.ranks.free_port", lambda: port)

    with connected(2) as (threads, groups):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), 5.0)
        sums = threads.on_all(lambda rank: groups[rank].all_reduce(values_of(rank)))

    assert torch.equal(sums[0], values_of(0) + values_of(1))


def count_threads_and_sockets() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(sockets_of_this_process())


def listening() -> set[str]:
    """Return where this process listens (others of its threads may), as the kernel writes it."""
    sockets = Path("/proc/self/net/tcp").read_text() + Path("/proc/self/net/tcp6").read_text()
    inodes = sockets_of_this_process()
    return {
        fields[1]
        for fields in map(str.split, sockets.splitlines())
        if fields[3] == "0A" and fields[9] in inodes
    }


def sockets_of_this_process() -> set[str]:
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes
