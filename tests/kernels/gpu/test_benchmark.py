"""The script that measures kernels and engine goes through all of it where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.gpu import engine
from tests.benchmarks.gpu.shapes import TINY_MOE
from tests.benchmarks.gpu.workers import findings
from tests.kernels.gpu.devices import interpreted_only

ROOT = Path(__file__).parents[3]


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


def measure(part: str, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "found.json"
    program = ROOT / "tests" / "benchmarks" / "gpu" / "run.py"
    subprocess.run(
        [sys.executable, program, "--only", part, "--interpret", "--json", path],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_what_ends_or_hangs_a_worker_does_not_end_the_rest() -> None:
    def worker(first: int) -> Sequence[str]:
        return [sys.executable, "-c", WORKER, str(first)]

    found = list(findings(worker, silence_s=5, until=time.monotonic() + 60))

    assert found == [
        {"name": 0, "failure": ""},
        {"name": 1, "failure": "FAILED: the process ended with 9"},
        {"name": 2, "failure": ""},
        {"name": 3, "failure": "FAILED: nothing for 5 s"},
        {"name": 4, "failure": "known"},
        {"name": 5, "failure": ""},
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

    assert list(found) == [{"failure": f"FAILED: {failure}"} for failure in failures]


def test_a_decode_step_is_held_against_the_experts_that_its_rows_choose() -> None:
    with engine.checkpoint(TINY_MOE) as path:
        built = engine.build(path, tiny=True)

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


@interpreted_only
def test_the_engine_and_transformers_answer_and_are_written_down(tmp_path: Path) -> None:
    found = measure("engine", tmp_path)

    rates = [each for each in found["engine"] if each["unit"] == "tokens/s"]
    assert [(each["model"], each["what"].split()[0]) for each in rates] == [
        ("tiny", "engine"),
        ("tiny", "transformers,"),
        ("tiny-moe", "engine"),
        ("tiny-moe", "transformers,"),
    ]
    assert min(each["value"] for each in rates) > 0
    assert [each["failure"] for each in found["engine"]] == len(found["engine"]) * [""]


@interpreted_only
def test_every_kernel_is_called_and_written_down(tmp_path: Path) -> None:
    found = measure("kernels", tmp_path)

    assert {each["kernel"].split()[0] for each in found["kernels"]} == {
        "add_rms_norm",
        "attend_decode_paged",
        "attend_extend",
        "choose_on_device",
        "linear_invariant",
        "linear_quant",
        "lora",
        "moe",
        "rotate_and_store",
        "route",
        "silu_and_mul",
        "torch",
    }
    assert all(each["num_bytes"] > 0 for each in found["kernels"])
    assert found["machine"]["triton"] != "none"
