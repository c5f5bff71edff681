"""All replicas of an application load the commit that a name means when it is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.deployments.model_versions import pin_versions
from remora.engine.sources.models import Wanted
from remora.engine.weights.resolve_model import resolve_model
from tests.engine.sources.hub_server import OFFLINE_ADDRESS, Hub, point_to, serving_hub

REPO = "me/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub(REPO, tmp_path / "hub", monkeypatch) as hub:
        hub.files = {"config.json": b"{}"}
        yield hub


def test_names_of_the_hub_get_their_commit(hub: Hub, tmp_path: Path) -> None:
    args = {
        "model": {"path": REPO, "tokenizer_path": str(tmp_path), "served_name": "t"},
        "speculation": {"method": "draft", "draft_model": f"{REPO}@main"},
        "lora": {"adapters": [{"name": "a", "path": f"hf://{REPO}"}]},
        "engine": {"page_size": 32},
    }
    at = f"{REPO}@{hub.commit}"

    assert pin_versions(args) == {
        "model": {"path": at, "tokenizer_path": str(tmp_path), "served_name": "t"},
        "speculation": {"method": "draft", "draft_model": at},
        "lora": {"adapters": [{"name": "a", "path": f"hf://{at}"}]},
        "engine": {"page_size": 32},
    }
    assert pin_versions({"models": [args]})["models"] == [pin_versions(args)]
    gguf = {"model": {"path": f"{REPO}:Q4_0"}}
    assert pin_versions(gguf) == {"model": {"path": f"{at}:Q4_0"}}


def test_a_folder_for_downloads_may_know_the_commit(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "downloads"
    resolve_model(REPO, tmp_path, Wanted(weights="none", folder=place))
    point_to(monkeypatch, OFFLINE_ADDRESS)
    args = {"model": {"path": REPO, "download_dir": str(place)}}

    assert pin_versions(args)["model"]["path"] == f"{REPO}@{hub.commit}"
    assert pin_versions({"model": {"path": REPO}})["model"]["path"] == REPO


def test_other_names_stay(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to(monkeypatch, OFFLINE_ADDRESS)
    for name in ("smollm2-135m-instruct", "/models/tiny", "s3://bucket/tiny", REPO):
        args = {"model": {"path": name}}
        assert pin_versions(args) == args
