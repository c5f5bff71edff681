"""The command line wins over the environment, that over the file, that over its profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import FileModel, load_serve_file
from remora.configs.value_sources import of_environment, of_options

HEAD = "applications:\n  - import_path: remora.deployments.app:build\n    args:\n"


def load(tmp_path: Path, body: str, options: list[str], environ: dict[str, str]) -> FileModel:
    path = tmp_path / "a.yaml"
    path.write_text(HEAD + body)
    overrides = [*of_environment(environ), *of_options(options)]
    (model,) = load_serve_file(path, overrides=overrides).models.values()
    return model


def test_each_layer_wins_over_those_below_it(tmp_path: Path) -> None:
    body = (
        "      profile: gpu\n      model: {path: m}\n"
        "      engine: {max_queued_requests: 1, page_size: 32, num_threads: 1}\n"
    )
    environ = {"REMORA_ENGINE__PAGE_SIZE": "64", "REMORA_ENGINE__NUM_THREADS": "2"}
    model = load(tmp_path, body, ["engine.num_threads=3"], environ)
    engine, written = model.config.engine, model.written
    assert (engine.num_threads, written["engine.num_threads"]) == (3, "--set engine.num_threads")
    assert (engine.page_size, written["engine.page_size"]) == (64, "REMORA_ENGINE__PAGE_SIZE")
    assert (engine.max_queued_requests, written["engine.max_queued_requests"]) == (1, "line 6")
    assert (engine.device, written["engine.device"]) == ("cuda", "line 4")
    assert "engine.seed" not in written


def test_values_are_read_as_yaml(tmp_path: Path) -> None:
    options = ["engine.kv_memory=2GiB", "engine.prefix_cache=false", "lora.roots=[/a, /b]"]
    options += ["lora.dynamic=true", "model.context_length=null"]
    config = load(tmp_path, "      model: {path: m, context_length: 5}\n", options, {}).config
    assert config.engine.kv_memory == 2 * 2**30
    assert not config.engine.prefix_cache
    assert config.lora.roots == ["/a", "/b"]
    assert config.model.context_length is None


def test_other_variables_are_ignored() -> None:
    assert of_environment({"REMORA_CACHE": "/x", "REMORA_API_KEY": "k", "ENGINE__X": "1"}) == []


def test_several_models_have_no_overrides(tmp_path: Path) -> None:
    body = "      models:\n        - model: {path: a}\n        - model: {path: b}\n"
    with pytest.raises(ConfigError, match=r"^--set engine\.page_size: "):
        load(tmp_path, body, ["engine.page_size=32"], {})


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    names = "must be one of cpu, embedding, gpu, multi-gpu, moe"
    with pytest.raises(ConfigError, match=f"a.yaml:4:16: profile = 'gup': {names}"):
        load(tmp_path, "      profile: gup\n      model: {path: m}\n", [], {})
