"""What `make gpu-here` is made of: workers that die, files, verdicts, traces, launch tables."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from remora.kernels.gpu.arch import Arch
from tests.benchmarks.gpu import results as files
from tests.benchmarks.gpu.built import build
from tests.benchmarks.gpu.launch_tables import entries
from tests.benchmarks.gpu.results import Results
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.shapes import TINY_MOE
from tests.benchmarks.gpu.stages.correctness import greatest_error, same_bits
from tests.benchmarks.gpu.timing import Call
from tests.benchmarks.gpu.traces import summarise
from tests.benchmarks.gpu.verdict import MAX_LINES, is_well, verdict
from tests.benchmarks.gpu.workers import findings

# Finds 0 and 2; ends at 1 without a word, hangs at 3, and tells that 4 failed before it ends.
WORKER = """
import os, sys, time
from tests.benchmarks.gpu.workers import begin, tell
for place in range(int(sys.argv[1]), 6):
    begin(place, {"name": place})
    if place == 1:
        os._exit(9)
    if place == 3:
        time.sleep(60)
    if place == 4:
        tell({"name": 4, "failure": "known"})
        sys.exit(1)
    print("a library says something")
    tell({"name": place, "failure": ""})
"""


def test_what_ends_or_hangs_a_worker_does_not_end_the_rest() -> None:
    def worker(first: int) -> Sequence[str]:
        return [sys.executable, "-c", WORKER, str(first)]

    found = list(findings(worker, silence_s=5, until=time.monotonic() + 60))

    assert found == [
        {"name": 0, "failure": ""},
        {"name": 1, "failure": "the process ended with 9"},
        {"name": 2, "failure": ""},
        {"name": 3, "failure": "nothing for 5 s"},
        {"name": 4, "failure": "known"},
        {"name": 5, "failure": ""},
    ]


def test_a_case_has_a_time_of_its_own_and_what_is_left_out_is_told() -> None:
    program = """
import sys, time
from tests.benchmarks.gpu.workers import announce, begin
announce(5)
for place in range(int(sys.argv[1]), 5):
    begin(place, {"name": place}, 0.5 if place == 0 else None)
    time.sleep(60)
"""
    ends = time.monotonic() + 4

    found = list(
        findings(
            lambda first: [sys.executable, "-c", program, str(first)], silence_s=60, until=ends
        )
    )

    assert found == [
        {"name": 0, "failure": "nothing for 0 s"},
        {"name": 1, "failure": "the time was up; 3 later cases were not reached"},
    ]


@pytest.mark.parametrize(
    ("program", "time_s", "failures"),
    [
        ("import time; time.sleep(60)", 1, ["the time was up"]),
        ("raise SystemExit(3)", 60, 4 * ["the process ended with 3"]),
    ],
)
def test_workers_that_only_hang_or_die_are_given_up(
    program: str, time_s: float, failures: list[str]
) -> None:
    command = [sys.executable, "-c", program]

    found = findings(lambda first: command, silence_s=60, until=time.monotonic() + time_s)

    assert list(found) == [{"failure": failure} for failure in failures]


def test_a_decode_step_is_held_against_the_experts_that_its_rows_choose() -> None:
    built = build(TINY_MOE, tiny=True)

    norms = 2 * 64 + 2 * 16
    attention = 64 * (4 + 2 * 2) * 16 + 4 * 16 * 64
    outside = 2 * (norms + attention + 4 * 64) + 64 + 512 * 64
    expert = 3 * 64 * 32
    of_token = 2 * 2 * 2 * 16
    for rows, read in ((1, 2.0), (2, 3.0), (3, 3.5)):
        weights = outside + 2 * read * expert
        assert built.decode_bytes(rows, 100) == 4 * (weights + rows * 100 * of_token)
    products = attention + 4 * 64 + 2 * expert
    seen = 2 * 10 * 11 / 2
    assert built.prefill_flops(10) == 2 * (10 * 2 * products + 512 * 64) + 4 * 4 * 16 * seen


def make_row(**fields: Any) -> Row:
    return Row(**{"model": "tiny", "what": "decode", **fields})


def test_rows_are_on_disk_as_soon_as_they_are_found(tmp_path: Path) -> None:
    results = Results("a", tmp_path, tmp_path / "work")
    results.add("engine", asdict(make_row(value=1.0)))

    found = json.loads((tmp_path / "gpu-a.json").read_text())

    assert [row["value"] for row in found["stages"]["engine"]] == [1.0]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["gpu-a.json"]


def test_a_tar_leaves_out_what_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 3000)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 2000)
    results = Results("a", tmp_path, tmp_path / "work")
    (tmp_path / "work" / "short.log").write_text("short")
    (tmp_path / "work" / "long.log").write_text("x" * 5000 + "end")
    (tmp_path / "work" / "longer.log").write_text("x" * 6000)

    left_out = results.pack()

    with tarfile.open(tmp_path / "gpu-a.tar.gz") as tar:
        assert tar.getnames() == ["gpu-a.json", "short.log", "long.log"]
        long = tar.extractfile("long.log")
        assert long is not None
        assert long.read() == b"x" * 1997 + b"end"
    assert left_out == ["longer.log"]


def test_a_verdict_is_one_screen_and_begins_with_what_is_bad() -> None:
    good = make_row(value=1.0, unit="ms", share=0.9, limit="bytes").asking_share(0.8)
    slow = make_row(value=1.0, unit="ms", share=0.7, limit="bytes").asking_share(0.8)
    failed = make_row(failure="out of memory")
    stages = {"engine": [asdict(row) for row in (*[good] * 99, slow, failed)]}

    lines = verdict("a", stages)

    assert len(lines) == MAX_LINES
    assert lines[0] == "part a: NOT all as asked"
    assert "101 rows, 99 of 100 as asked, 1 failed" in lines[1]
    assert [line[:4] for line in lines[2:5]] == ["NOT ", "FAIL", "ok  "]
    assert not is_well(stages)
    assert is_well({"engine": [asdict(good)]})
    assert not is_well({})


def test_idle_time_is_what_no_kernel_covers() -> None:
    found = summarise([("a", 0, 4), ("b", 2, 3), ("a", 6, 8), ("c", 9, 10)])

    assert found.kernels == [("a", 2, 6), ("b", 1, 1), ("c", 1, 1)]
    assert found.span_us == 10
    assert found.idle_share == pytest.approx(0.3)


def test_an_error_is_measured_in_tolerances_and_other_bits_are_seen() -> None:
    want = torch.ones(4)
    got = torch.tensor([1.0, 1.03, 1.0, 1.0])
    call = Call(lambda: got, expected=lambda result: iter([(result, want)]))

    error, unit = greatest_error(call, got)
    lost, _ = greatest_error(call, got / 0)

    assert error == pytest.approx(0.5, rel=1e-3)
    assert unit == "tolerance"
    assert lost > 1e30
    assert same_bits(got, got.clone())
    assert not same_bits(torch.zeros(1), -torch.zeros(1))


def test_every_swept_entry_is_in_a_table_and_returns_to_it() -> None:
    for entry in entries(tiny=False):
        before = entry.launch(Arch.HOPPER)
        other = next(entry.others(Arch.HOPPER))
        with entry.replaced(Arch.HOPPER, other):
            assert entry.launch(Arch.HOPPER) == other
        assert entry.launch(Arch.HOPPER) == before != other


def test_a_stopped_run_leaves_what_it_has_measured(tmp_path: Path) -> None:
    program = Path(files.__file__).with_name("here.py")
    options = ["--part", "b", "--device", "cpu", "--out", str(tmp_path)]
    options += ["--work", str(tmp_path / "work")]
    with subprocess.Popen(
        [sys.executable, program, *options], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        lines = [run.stdout.readline() for _ in range(2)]
        while "multiplies" not in lines[-1]:
            lines.append(run.stdout.readline())
        run.terminate()
        rest = run.stdout.read()

    assert lines[0].startswith("Missing packages: ")
    assert lines[1].startswith("NO GPU")
    assert "part b: " in rest
    with tarfile.open(tmp_path / "gpu-b.tar.gz") as tar:
        assert {"gpu-b.json", "verdict.txt", "ceilings-bounds.log"} <= set(tar.getnames())
