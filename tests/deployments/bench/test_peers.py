"""Peers that fail while they are measured (tests/benchmarks/peers)."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.deployments.bench.workloads import OFFLINE
from tests.benchmarks.peers import llama_bench
from tests.benchmarks.peers.peers import PeerError

ANSWER = '[{"samples_ts": [7.0, 9.0, 8.0]}]'


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a program in the place of llama.cpp's; tests write it."""
    path = tmp_path / "tool"
    monkeypatch.setattr(llama_bench, "llama_tool", lambda _: path)
    return path


def write(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_a_crash_is_noted_and_the_other_workloads_are_measured(tool: Path) -> None:
    write(tool, f"case \"$*\" in *'-n 0'*) kill -SEGV $$;; esac; echo '{ANSWER}'")
    workloads = [OFFLINE["decode"], OFFLINE["prefill"]]

    figures, crashes = llama_bench.measure_all(tool, workloads, threads=1, samples=3)

    assert figures == {"decode": {"decode_tok_s": 8.0}}
    assert crashes == {"prefill": "llama-bench crashed: SIGSEGV"}


def test_a_refusal_ends_the_measurement(tool: Path) -> None:
    write(tool, "exit 3")

    with pytest.raises(PeerError, match="ended with 3"):
        llama_bench.measure_all(tool, [OFFLINE["decode"]], threads=1, samples=3)
