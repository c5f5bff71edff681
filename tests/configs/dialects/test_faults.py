"""All faults of another server's configuration are reported at once, or left out on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.translate import State
from remora.configs.errors import ConfigError
from remora.deployments.cli.convert import converted
from remora.deployments.cli.target import read_target

LINE = (
    "--model-path", "m", "--page-size", "17", "--tp", "two", "--enable-lmcache", "--no-such", "1",
    "--max-running-requests", "4", "--schedule-policy",
)  # fmt: skip
HEAD = "applications:\n  - import_path: remora.deployments.app:build\n    args:\n"
FILE = f"""{HEAD}      dialect: vllm
      args:
        model: m
        tensor-parallel-size: two
        enable-dbo: true
        max-num-sqs: 4
      engine:
        page_size: 17
"""


def faults_of(target: tuple[str, ...], dialect: str | None, *, skips: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_target(target, dialect, (), skips=skips)
    return str(caught.value).split("\n")


def test_all_faults_of_a_command_line_are_named() -> None:
    faults = faults_of(LINE, "sglang")

    assert [fault.split()[0].rstrip(":") for fault in faults] == [
        "--schedule-policy",  # without a value
        "--tp",
        "--no-such",
        "--enable-lmcache",
        "--page-size",  # remora's own check
    ]


def test_all_faults_of_a_file_are_named_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FILE)
    faults = faults_of((str(path),), None)

    places = sorted(fault.removeprefix(f"{path}:").partition(": ")[0] for fault in faults)
    assert places == ["11:20", "7:9", "8:9", "9:9"]


@pytest.mark.parametrize("system", ["vllm", "sglang"])
def test_an_error_names_the_release(system: str) -> None:
    faults = faults_of(("--tensor-parallel-size", "two", "--no-such", "1"), system)
    title = DIALECTS[system].name  # type: ignore[index]

    assert title.split()[-1][0].isdigit()
    assert all(title in fault for fault in faults)
    assert len(faults) == 2


def test_what_is_not_supported_can_be_left_out() -> None:
    target = ("--model-path", "m", "--enable-lmcache", "--no-such", "1", "--tp", "2")
    read = read_target(target, "sglang", (), skips=True)
    raw, lines = read.raw, read.lines

    dropped = [line for line in lines if line.state is State.REFUSED]
    assert sorted(line.name for line in dropped) == ["--enable-lmcache", "--no-such"]
    assert all("left out: " in str(line) for line in dropped)
    assert raw["applications"][0]["args"]["parallel"] == {"tp_size": 2}


def test_what_depends_on_it_is_left_out_too() -> None:
    # Its heads are a model of their own, which is missing here.
    target = ("--model-path", "m", "--speculative-algorithm", "EAGLE3",
              "--speculative-num-steps", "3")  # fmt: skip
    read = read_target(target, "sglang", (), skips=True)
    raw, lines = read.raw, read.lines

    assert "speculation" not in raw["applications"][0]["args"]
    assert len([line for line in lines if line.state is State.REFUSED]) >= 1


def test_values_that_are_wrong_stay_faults() -> None:
    faults = faults_of(("--model-path", "m", "--tp", "two", "--no-such", "1"), "sglang", skips=True)

    assert [fault.split()[0] for fault in faults] == ["--tp"]


def test_a_secret_that_is_left_out_is_not_shown() -> None:
    target = ("--model-path", "m", "--api-key", "abc")
    lines = read_target(target, "sglang", (), skips=True).lines

    assert "abc" not in " ".join(map(str, lines))
    assert "***" in " ".join(map(str, lines))


def test_a_conversion_notes_what_it_leaves_out() -> None:
    text, notes = converted(
        ("--model-path", "m", "--enable-lmcache"), "sglang", "lightllm", skips=True
    )

    assert text.endswith("--model_dir m")
    assert any(note.startswith("--enable-lmcache") and "left out" in note for note in notes)
