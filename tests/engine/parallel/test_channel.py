"""Rank 0 and the others, over real sockets: order, bad news, and strangers."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import EngineError
from remora.engine.parallel.channel import Address, Channel, Listener, read_message
from remora.engine.parallel.followers import ChannelFollowers
from remora.engine.parallel.wire import Failed, Logits, Step, encode_logits, encode_step
from tests.engine.parallel.plans import as_sent, make_steps

HOSTS = (None, "127.0.0.1")


class Ranks:
    """Rank 0's followers, and the followers' channels by rank."""

    def __init__(self, host: str | None, num_ranks: int) -> None:
        with closing(Listener(host)) as listener:
            self.address = listener.address
            self.channels = {
                rank: Channel.connect(listener.address, rank, 5.0) for rank in range(1, num_ranks)
            }
            self.followers = ChannelFollowers(listener.accept(num_ranks, 5.0))
        self.failures: queue.Queue[EngineError] = queue.Queue()
        self.followers.on_failure(self.failures.put)

    def close(self) -> None:
        self.followers.close()
        for channel in self.channels.values():
            channel.close()


@pytest.fixture(params=HOSTS, ids=["unix", "tcp"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with closing(Ranks(request.param, 3)) as made:
        yield made


@given(st.lists(make_steps(), max_size=5))
def test_steps_and_questions_arrive_in_order(steps: list[Step]) -> None:
    with closing(Ranks(None, 2)) as ranks:
        for number, step in enumerate(steps):
            ranks.followers.step(step.plan, step.rows, step.token_ids)
            ranks.followers.logits(number, number + 1)

        for number, step in enumerate(steps):
            arrived = ranks.channels[1].receive()
            assert isinstance(arrived, Step)
            assert as_sent(arrived) == as_sent(step)
            assert ranks.channels[1].receive() == Logits(number, number + 1)


@given(make_steps(), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_frames_may_arrive_in_any_pieces(step: Step, sizes: list[int]) -> None:
    frames = encode_step(step.plan, step.rows, step.token_ids) + encode_logits(1, 2)
    ours, theirs = socket.socketpair()

    def trickle() -> None:
        with theirs:
            at, turn = 0, 0
            while at < len(frames):
                at += theirs.send(frames[at : at + sizes[turn % len(sizes)]])
                turn += 1

    thread = threading.Thread(target=trickle)
    thread.start()
    with ours:
        messages = [read_message(ours) for _ in range(3)]
    thread.join()

    assert isinstance(messages[0], Step)
    assert as_sent(messages[0]) == as_sent(step)
    assert messages[1:] == [Logits(1, 2), None]


def test_every_rank_gets_everything_until_rank_0_is_gone(ranks: Ranks) -> None:
    ranks.followers.logits(3, 4)
    assert [channel.receive() for channel in ranks.channels.values()] == [Logits(3, 4)] * 2

    ranks.followers.close()
    ranks.followers.close()

    assert ranks.channels[1].receive() is None
    assert ranks.failures.empty()
    assert ranks.followers.failure is None


LOST_RANK_0 = Failed("rank 0 does not answer", second_hand=True)


@pytest.mark.parametrize(
    ("endings", "reported"),
    [
        ([(2, None)], "Rank 2 has failed: its process has ended."),
        ([(1, Failed("out of memory")), (1, None), (2, None)], "Rank 1 has failed: out of memory."),
        # A rank that was lost is reported, not the rank that lost it.
        (
            [(1, Failed("rank 2 does not answer", second_hand=True)), (2, None)],
            "Rank 2 has failed: its process has ended.",
        ),
        ([(1, LOST_RANK_0), (2, LOST_RANK_0)], "Rank 1 has failed: rank 0 does not answer."),
    ],
)
def test_the_first_failure_is_reported_once_with_its_reason(
    ranks: Ranks, endings: list[tuple[int, Failed | None]], reported: str
) -> None:
    for rank, failed in endings:
        if failed is None:
            ranks.channels[rank].close()
        else:
            ranks.channels[rank].fail(failed)
        time.sleep(0.02)

    failure = ranks.failures.get(timeout=10)

    assert str(failure) == reported
    assert ranks.followers.failure is failure
    time.sleep(0.05)
    assert ranks.failures.empty()


def test_late_callbacks_and_senders_learn_of_a_failure(ranks: Ranks) -> None:
    ranks.channels[1].fail(Failed("out of memory"))
    ranks.channels[1].close()
    ranks.failures.get(timeout=10)
    late: list[EngineError] = []

    ranks.followers.on_failure(late.append)

    assert "Rank 1" in str(late[0])
    with pytest.raises(EngineError, match=r"Rank 1 has failed: out of memory"):
        ranks.followers.logits(0, 1)


def test_what_rank_0_has_lost_is_blamed_on_the_follower(ranks: Ranks) -> None:
    lost = EngineError("connection closed by peer")
    threading.Timer(0.05, lambda: ranks.channels[2].fail(Failed("boom"))).start()

    assert "Rank 2 has failed: boom" in str(ranks.followers.cause_of(lost))


def test_errors_of_rank_0_itself_are_its_own(ranks: Ranks) -> None:
    own = ZeroDivisionError()

    assert ranks.followers.cause_of(own) is own


@pytest.mark.parametrize("host", HOSTS)
def test_strangers_are_turned_away(host: str | None) -> None:
    with closing(Listener(host)) as listener, ExitStack() as opened:
        good = listener.address
        bad = Address(secret=bytes(32), path=good.path, host=good.host, port=good.port)
        stranger = opened.enter_context(closing(Channel.connect(bad, 1, 5.0)))
        outside = opened.enter_context(closing(Channel.connect(good, 7, 5.0)))
        opened.enter_context(closing(Channel.connect(good, 1, 5.0)))

        connections = listener.accept(2, 5.0)
        with closing(ChannelFollowers(connections)):
            assert stranger.receive() is None
            assert outside.receive() is None
            assert list(connections) == [1]


def test_a_unix_socket_is_for_this_user_only_and_leaves_no_file() -> None:
    listener = Listener()
    folder = Path(listener.address.path).parent

    assert folder.stat().st_mode & 0o077 == 0
    listener.close()
    listener.close()
    assert not folder.exists()


def test_tcp_listens_at_the_address_given_only() -> None:
    with closing(Listener("127.0.0.1")) as listener:
        assert listener.address.host == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", listener.address.port), 1.0)


def test_a_path_too_long_is_named_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    with pytest.raises(EngineError, match=r"cannot listen at .*x{120}/remora-.*too long"):
        Listener()
    assert list(deep.iterdir()) == []


def test_strangers_who_drip_hold_nobody_up() -> None:
    with closing(Listener("127.0.0.1")) as listener, ExitStack() as opened:
        at = ("127.0.0.1", listener.address.port)
        stranger = opened.enter_context(socket.create_connection(at, 5.0))
        is_over = threading.Event()

        def drip() -> None:
            while not is_over.wait(0.1):
                with suppress(OSError):
                    stranger.sendall(b"r")

        dripping = threading.Thread(target=drip)
        dripping.start()
        opened.callback(dripping.join)
        opened.callback(is_over.set)
        opened.enter_context(closing(Channel.connect(listener.address, 1, 5.0)))

        connections = listener.accept(2, 3.0)
        opened.enter_context(connections[1])
        assert list(connections) == [1]


def test_missing_ranks_are_named() -> None:
    with (
        closing(Listener()) as listener,
        closing(Channel.connect(listener.address, 2, 5.0)) as came,
    ):
        with pytest.raises(EngineError, match=r"within 0\.3 s.*missing: 1, 3"):
            listener.accept(4, 0.3)
        assert came.receive() is None


def test_waiting_ends_when_start_up_is_given_up() -> None:
    listener = Listener()
    threading.Timer(0.1, listener.close).start()

    with pytest.raises(EngineError, match="cancelled"):
        listener.accept(2, 60.0)


def test_a_follower_that_finds_nobody_says_where_it_looked(tmp_path: Path) -> None:
    nowhere = Address(secret=bytes(32), path=os.fspath(tmp_path / "steps"))

    with pytest.raises(EngineError, match="Rank 1 cannot reach rank 0 at"):
        Channel.connect(nowhere, 1, 1.0)
