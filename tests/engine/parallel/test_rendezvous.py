"""Several ranks behind one scheduler give what one rank gives: the whole engine, without Ray."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from remora.configs.errors import ConfigError, EngineError
from remora.configs.load import parse_args
from remora.engine.engine import Engine
from remora.engine.launch import build_engine
from remora.engine.parallel.channel import Channel
from remora.engine.parallel.connect import c10d, listen
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.micro_batches import split_inputs
from remora.engine.parallel.rendezvous import Host, join
from remora.engine.parallel.wire import JoinGroup, encode_join_group
from remora.engine.runner.inputs import StepInputs
from remora.engine.types import Request, SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.parallel.teams import ThreadTeam

REQUESTS = {
    "greedy": SamplingParams(max_tokens=12, temperature=0.0),
    "seeded": SamplingParams(max_tokens=12, temperature=0.8, seed=7, n=2),
    "scored": SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2),
    "long": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
}


def make_config(path: object, **parallel: Any) -> Any:
    engine = {"kv_tokens": 512, "num_threads": 1, "cpu_kernels": "torch"}
    model = {"path": str(path), "dtype": "float32"}
    return parse_args({"model": model, "engine": engine, "parallel": parallel})


def run(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each sequence; requests join one after another."""
    made: dict[tuple[str, int], list[int]] = {}
    waiting = list(REQUESTS.items())
    while waiting or engine.has_work:
        if waiting:
            name, sampling = waiting.pop()
            prompt = [30 + at % 200 for at in range(0, 7 * len(name) * len(name), 3)]
            engine.add(Request(request_id=name, prompt_ids=prompt, sampling=sampling))
        for output in engine.step():
            made.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return made


def run_team(config: Any, address: str | None = None) -> dict[tuple[str, int], list[int]]:
    """Run an engine whose other ranks are threads."""
    team = ThreadTeam(address=address)
    engine = build_engine(config, team=team, show_progress=False).engine
    try:
        return run(engine)
    finally:
        engine.close()
        team.join()
        assert team.errors == []


@pytest.mark.parametrize(
    ("parallel", "address"),
    [
        ({"tp_size": 2}, None),
        ({"tp_size": 2}, "127.0.0.1"),  # as across nodes, by TCP
        ({"pp_size": 2}, None),
        ({"tp_size": 2, "pp_size": 2}, None),
    ],
)
def test_ranks_give_the_tokens_of_one_rank(
    parallel: dict[str, int], address: str | None, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    alone = build_engine(make_config(path), show_progress=False).engine

    assert run_team(make_config(path, **parallel), address) == run(alone)


@pytest.mark.observes("parallel.micro_batches")
@pytest.mark.parametrize(("written", "parts"), [({}, 2), ({"micro_batches": 3}, 3)])
def test_a_step_is_cut_into_as_many_parts_as_is_written(
    written: dict[str, int],
    parts: int,
    tiny_checkpoints: TinyCheckpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuts: list[int] = []

    def noted(inputs: StepInputs, num_parts: int) -> list[StepInputs]:
        cuts.append(num_parts)
        return split_inputs(inputs, num_parts)

    monkeypatch.setattr("remora.engine.runner.eager.split_inputs", noted)

    run_team(make_config(tiny_checkpoints("llama"), pp_size=2, **written))

    assert set(cuts) == {parts}


def hosted(exchange_s: float) -> tuple[Host, Future[tuple[Channel, Group]], ThreadPoolExecutor]:
    """Let rank 1 of 2 come to a meeting."""
    host = Host(None, come_s=20.0, exchange_s=exchange_s)
    threads = ThreadPoolExecutor(1)
    coming = threads.submit(join, host.meeting, Layout(rank=1, tp_size=2), "cpu")
    return host, coming, threads


def test_ranks_wait_for_a_slow_rank_0_longer_than_for_an_exchange() -> None:
    host, coming, threads = hosted(exchange_s=0.3)
    with threads, closing(host):
        time.sleep(1.0)
        followers, group = host.gather(Layout(tp_size=2), "cpu")

        for left in (*coming.result(), followers, group):
            left.close()


def test_a_rank_that_is_lost_while_all_join_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(self: Channel, timeout_s: float) -> JoinGroup:
        raise MemoryError("no room")

    monkeypatch.setattr(Channel, "wait_to_join", lose)
    host, coming, threads = hosted(exchange_s=300.0)

    with threads, closing(host), pytest.raises(EngineError, match=r"^Rank 1 has failed: no room"):
        host.gather(Layout(tp_size=2), "cpu")
    assert isinstance(coming.exception(), MemoryError)


def test_a_rank_that_loses_rank_0_while_all_join_ends_at_once() -> None:
    meeting = Host(None, come_s=20.0, exchange_s=300.0)
    with closing(meeting), listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(join, meeting.meeting, Layout(rank=1, tp_size=3), "cpu")
        ((_, rank_1),) = meeting._listener.accept(2, 20.0).items()
        store = c10d.TCPStore(  # of a rank 0 that hangs up
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        rank_1.sendall(encode_join_group(JoinGroup("127.0.0.1", store.port)))
        rank_1.close()

        with pytest.raises(EngineError, match="another rank failed"):
            coming.result(20.0)


def test_several_ranks_without_a_team_are_refused(tiny_checkpoints: TinyCheckpoints) -> None:
    config = make_config(tiny_checkpoints("llama"), tp_size=2)

    with pytest.raises(ConfigError, match=r"parallel\.tp_size \* parallel\.pp_size is 2.*serve"):
        build_engine(config, show_progress=False)
