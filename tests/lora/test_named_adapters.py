"""Adapters that a configuration names: of the hub, without lora.dynamic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.configs.errors import ConfigError
from remora.configs.sections.lora import LoraSection
from remora.lora.files import CONFIG, WEIGHTS
from remora.lora.setup import configured, digests
from tests.engine.sources.hub_server import Hub, serving_hub
from tests.lora.peft_files import write_adapter

REPO = "me/pirate"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub(REPO, tmp_path / "hub", monkeypatch) as hub:
        hub.put(write_adapter(tmp_path / "written"))
        yield hub


def section(*paths: str) -> LoraSection:
    entries = [{"name": f"a{index}", "path": path} for index, path in enumerate(paths)]
    return LoraSection.model_validate({"adapters": entries})


@pytest.mark.parametrize("path", [REPO, f"hf://{REPO}", f"{REPO}@main"])
def test_an_adapter_of_the_hub_is_downloaded_once(path: str, hub: Hub, tmp_path: Path) -> None:
    local = str(tmp_path / "written")

    adapting = configured(section(path, local))

    assert dict(adapting.lora_ids) == {"a0": 1, "a1": 2}
    first, second = digests(section(path, local))
    assert first == second
    assert sorted(hub.fetched) == [CONFIG, WEIGHTS]


def test_an_adapter_that_is_not_there_gets_one_line(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"lora\.adapters, a0: .*has no hf://me/none") as refused:
        configured(section("me/none"))
    assert "\n" not in str(refused.value)
