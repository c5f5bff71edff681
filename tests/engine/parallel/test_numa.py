"""Ranks run on the CPUs of the NUMA nodes that the configuration names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.engine.launch import build_engine
from remora.engine.parallel import numa
from tests.conftest import TinyCheckpoints


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, set[int]]:
    """A machine of two nodes, the second without CPUs; returns the CPUs of each bound thread."""
    threads: dict[int, set[int]] = {}
    for node, cpus in (("node0", "0-1,8\n"), ("node1", "\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 8})
    monkeypatch.setattr(os, "sched_setaffinity", threads.__setitem__)
    return threads


def start(path: Path, nodes: str) -> None:
    config = parse_args(
        {
            "dialect": "sglang",
            "args": {"model-path": str(path), "numa-node": nodes},
            "engine": {"kv_tokens": 256, "device": "cpu"},
        }
    )
    build_engine(config, show_progress=False).engine.close()


@pytest.mark.observes("parallel.numa_nodes")
def test_all_threads_of_a_rank_run_on_its_node(
    bound: dict[int, set[int]], tiny_checkpoints: TinyCheckpoints
) -> None:
    start(tiny_checkpoints("llama"), "0")

    assert os.getpid() in bound
    assert all(cpus == {1, 8} for cpus in bound.values())


@pytest.mark.parametrize(
    ("node", "message"), [("1", "may use no CPU of NUMA node 1"), ("7", "no NUMA node 7 .* 0, 1")]
)
def test_a_node_without_cpus_or_that_is_not_there_ends_the_start(
    node: str, message: str, bound: dict[int, set[int]], tiny_checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tiny_checkpoints("llama"), node)
    assert bound == {}


def test_each_rank_has_its_own_node(bound: dict[int, set[int]]) -> None:
    numa.bind_rank((), 1)
    assert bound == {}
    numa.bind_rank((1, 0), 1)
    assert set(map(frozenset, bound.values())) == {frozenset({1, 8})}
