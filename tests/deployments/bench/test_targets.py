"""Targets with settings, and facts about the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from remora.configs.errors import ConfigError
from remora.deployments.bench.latency import EngineSteps, parse_steps
from remora.deployments.bench.machine import (
    busy_warning,
    describe_machine,
    describe_software,
    listener_pid,
    peak_memory,
)
from remora.deployments.bench.targets import read_target
from tests.deployments.bench.openai_server import FakeOpenAI, serving

FILE = Path(__file__).parents[3] / "configs" / "smollm2.yaml"


def test_settings_take_precedence_over_the_file() -> None:
    target = read_target(str(FILE), ["engine.num_threads=2", "model.dtype=float32"])

    assert target.config.engine.num_threads == 2
    assert target.config.model.dtype == "float32"
    assert target.config.model.path == "smollm2-135m-instruct"
    assert target.raw_args["engine"] == {"num_threads": 2}
    assert target.spec == f"{FILE},engine.num_threads=2,model.dtype=float32"


def test_a_relative_path_becomes_absolute_and_the_last_setting_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)

    config = read_target("model", ["engine.page_size=8", "engine.page_size=32"]).config

    assert (config.model.path, config.engine.page_size) == (str(tmp_path / "model"), 32)


@pytest.mark.parametrize(
    ("setting", "shown"),
    [("engine.speed=9", "engine.speed"), ("num_threads=2", "section.key=value")],
)
def test_a_wrong_setting_is_named(setting: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        read_target("smollm2-135m-instruct", [setting])


@pytest.mark.parametrize("name", [str(FILE.with_name("gateway.yaml")), "/no/model"])
def test_a_file_of_several_models_and_a_missing_model_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_target(name)


def test_a_list_of_one_model_is_that_model(tmp_path: Path) -> None:
    data = yaml.safe_load(FILE.with_name("gateway.yaml").read_text())
    args = data["applications"][0]["args"]
    args["models"] = [{"model": {"path": "smollm2-135m-instruct"}}]
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(data))

    target = read_target(str(tmp_path / "one.yaml"), ["model.dtype=float32"])

    assert target.config.model.path == "smollm2-135m-instruct"
    assert target.config.model.dtype == "float32"


def test_the_machine_and_the_software_are_described() -> None:
    assert describe_machine()["processor"]
    assert {"python", "remora", "torch"} <= set(describe_software())


def test_peak_memory() -> None:
    peak = peak_memory(os.getpid())

    assert peak is not None
    assert 2**20 < peak.largest_bytes <= peak.sum_bytes
    assert peak_memory(2**22 + 1) is None


def test_the_process_behind_a_port_is_found() -> None:
    with serving(FakeOpenAI()) as server:
        assert listener_pid(server.port) == os.getpid()
    assert listener_pid(1) is None


def test_the_busy_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 12.0, 20.0, 20.0])
    monkeypatch.setattr("remora.deployments.bench.machine._busy_s", lambda: next(moments))
    monkeypatch.setattr("remora.deployments.bench.machine._LOOK_S", 0.001)

    busy, idle = busy_warning(), busy_warning()

    assert busy is not None
    assert idle is None


def test_step_counters_are_read_from_the_metrics() -> None:
    text = (
        "# HELP remora_steps_total x\n"
        'remora_steps_total{model_name="a"} 10.0\n'
        'remora_steps_total{model_name="b"} 5.0\n'
        'remora_step_time_seconds_total{model_name="a"} 1.5\n'
        "other 3\n"
    )

    assert parse_steps(text) == EngineSteps(15.0, 1.5)
    assert parse_steps("vllm:steps 3\n") is None
