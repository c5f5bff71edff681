"""Comparisons of commands, URLs and configurations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remora.configs.errors import ConfigError
from remora.deployments.bench.compare import Rounds, as_table, compare_rows, missing, run_rounds
from remora.deployments.bench.contestants import (
    CommandContestant,
    Figures,
    parse_figures,
    read_contestant,
)
from remora.deployments.bench.machine import microarchitecture
from remora.deployments.bench.workloads import OFFLINE, Size, Workload, online
from remora.deployments.cli.main import app
from remora.deployments.cli.terminal import Failure
from tests.conftest import TinyCheckpoints
from tests.deployments.bench.openai_server import FakeOpenAI

WORKLOADS = [OFFLINE["decode"], OFFLINE["batch"]]


@dataclass
class Scripted:
    """A contestant with fixed figures that records the order of turns in a shared list."""

    spec: str
    turns: list[Figures]
    order: list[str] = field(default_factory=list)
    microarchitecture: str = ""

    def measure(self, workloads: Sequence[Workload], *, seed: int) -> Figures:
        self.order.append(f"{self.spec}{seed}")
        return self.turns[seed]


def write_script(folder: Path, text: str) -> str:
    path = folder / "peer.py"
    path.write_text(text)
    return f"cmd:{sys.executable} {path} {{workloads}} {{seed}}"


def test_sides_alternate_and_ratios_are_of_medians() -> None:
    order: list[str] = []
    a = Scripted("A", [{"batch": {"output_tok_s": v}} for v in (200.0, 220.0)], order)
    b = Scripted("B", [{"batch": {"output_tok_s": v}} for v in (100.0, 100.0)], order)

    rounds = run_rounds(a, b, WORKLOADS, num_rounds=2, on_turn=lambda: None)
    (row,) = compare_rows(rounds)

    assert order == ["A0", "B0", "A1", "B1"]
    assert (row.ratio.ratio, row.ratio.low, row.ratio.high) == pytest.approx((2.1, 2.0, 2.2))
    assert row.verdict == "A better"
    assert as_table([row]).rows[0][4:6] == ("2.10", "2.00 to 2.20")
    assert [result.workload for result in missing(rounds, WORKLOADS)] == ["decode"]


@pytest.mark.parametrize(
    ("figure", "a", "verdict"),
    [
        ("ttft_p50_ms", (200.0, 210.0), "B better"),
        ("ttft_p50_ms", (50.0, 52.0), "A better"),
        ("output_tok_s", (50.0, 52.0), "B better"),
        ("output_tok_s", (90.0, 130.0), "unclear: spread exceeds difference"),
        ("output_tok_s", (150.0,), "unknown: one round"),
        ("output_tok_s", (100.0, 100.0), "equal"),
    ],
)
def test_the_verdict(figure: str, a: tuple[float, ...], verdict: str) -> None:
    rounds = Rounds(
        a=[{"batch": {figure: value}} for value in a], b=[{"batch": {figure: 100.0}} for _ in a]
    )

    assert compare_rows(rounds)[0].verdict == verdict


def test_figures_of_a_command(tmp_path: Path) -> None:
    script = (
        "import sys, json\nprint('loading')\n"
        "names, seed = sys.argv[1:]\n"
        "print(json.dumps({n: {'decode_tok_s': 5 + int(seed)} for n in names.split(',')}))"
    )
    contestant = read_contestant(write_script(tmp_path, script), Size())

    figures = contestant.measure(WORKLOADS, seed=3)

    assert figures == {"decode": {"decode_tok_s": 8.0}, "batch": {"decode_tok_s": 8.0}}


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("import sys; sys.exit('no such model')", "exit code 1: no such model"),
        ("print('hello')", "'hello'"),
        ("print('{}')", "figure"),
    ],
)
def test_a_command_that_fails_is_an_error(tmp_path: Path, script: str, shown: str) -> None:
    contestant = read_contestant(write_script(tmp_path, script), Size())

    with pytest.raises(Failure, match=shown):
        contestant.measure(WORKLOADS, seed=0)
    with pytest.raises(Failure, match="/no/such/program"):
        CommandContestant("x", ["/no/such/program"]).measure(WORKLOADS, seed=0)


def test_reports_and_plain_figures_are_read_alike() -> None:
    plain = {"batch": {"output_tok_s": 5, "engine": "x", "bad": float("nan")}}

    for data in (plain, {"date": "now", "figures": plain}):
        assert parse_figures(json.dumps(data), "x") == {"batch": {"output_tok_s": 5.0}}


def test_figures_of_a_url(make_openai: Callable[..., FakeOpenAI]) -> None:
    contestant = read_contestant(make_openai().url, Size(requests=4, inputs=8, outputs=4))

    figures = contestant.measure([online(2), OFFLINE["embedding"]], seed=1)

    assert list(figures) == ["online-2"]
    assert figures["online-2"]["requests"] == 4


def test_figures_of_a_configuration(tiny_checkpoints: TinyCheckpoints) -> None:
    spec = f"{tiny_checkpoints('llama')},engine.num_threads=1,engine.kv_tokens=2048"
    contestant = read_contestant(spec, Size(inputs=16, outputs=4))

    figures = contestant.measure([OFFLINE["decode"]], seed=0)

    assert figures["decode"]["decode_tok_s"] > 0


@pytest.mark.parametrize("spec", ["/no/such/model", "smollm2-135m-instruct,engine.speed=9"])
def test_a_wrong_configuration_is_refused_before_the_first_run(spec: str) -> None:
    with pytest.raises(ConfigError):
        read_contestant(spec, Size())


def write_report(path: Path, microarchitecture: str | None) -> str:
    machine = {} if microarchitecture is None else {"microarchitecture": microarchitecture}
    path.write_text(json.dumps({"machine": machine, "figures": {"decode": {"decode_tok_s": 5.0}}}))
    return str(path)


@pytest.mark.parametrize(
    ("first", "second", "warns"),
    [
        ("Zen 4", "Sapphire Rapids", True),
        ("Zen 4", "Zen 4", False),
        ("Zen 4", None, False),
    ],
)
def test_reports_of_two_microarchitectures_are_compared_with_a_warning(
    tmp_path: Path, first: str, second: str | None, warns: bool
) -> None:
    sides = [write_report(tmp_path / f"{at}.json", of) for at, of in enumerate((first, second))]
    output = tmp_path / "compared.json"

    ran = CliRunner().invoke(
        app, ["bench", "compare", *sides, "--workload", "decode", "--json", str(output)]
    )

    assert ran.exit_code == 0, ran.output
    report = json.loads(output.read_text())
    assert report["rounds"]["A"][0] == {"decode": {"decode_tok_s": 5.0}}
    found = [text for text in report["warnings"] if "ratios compare the processors" in text]
    assert len(found) == warns


def test_a_report_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="cannot read"):
        read_contestant(str(tmp_path / "none.json"), Size())


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: x", "Zen 4"),
        ("vendor_id: GenuineIntel\ncpu family: 6\nmodel: 143", "Sapphire Rapids"),
        ("vendor_id: GenuineIntel\ncpu family: 6\nmodel: 1", "GenuineIntel family 6 model 1"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd40", "0x41 part 0xd40"),
        ("", ""),
    ],
)
def test_microarchitectures_are_named(cpuinfo: str, expected: str) -> None:
    assert microarchitecture(cpuinfo) == expected
