"""Adapters of the Hugging Face hub: a hub of our own on loopback, and then none at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from remora.configs.errors import InvalidAdapter, Unavailable
from remora.lora.adapter import read_adapter
from remora.lora.files import CONFIG, PICKLES, WEIGHTS
from remora.lora.sources import Sources
from tests.engine.sources.hub_server import Hub, point_to, serving_hub
from tests.lora.peft_files import AS_NAMED, SHAPES, make_tensors, write_adapter

MAX_BYTES = 100_000
REPO = "me/pirate"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub(REPO, tmp_path / "hub", monkeypatch) as hub:
        hub.put(write_adapter(tmp_path / "written"))
        hub.files["README.md"] = b"not for us"
        yield hub


def make_sources() -> Sources:
    return Sources(roots=["hf://me"], max_bytes=MAX_BYTES, pauses_s=(0, 0))


def test_the_two_files_are_fetched_once(hub: Hub) -> None:
    sources = make_sources()
    sources.check(f"hf://{REPO}")

    folder = sources.fetch(f"hf://{REPO}")

    assert read_adapter(folder, SHAPES, AS_NAMED).max_rank == 2
    assert sources.fetch(f"hf://{REPO}") == folder
    assert sorted(hub.fetched) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("revision", ["", "@main"])
def test_what_was_fetched_is_found_without_a_network(
    revision: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_sources().fetch(f"hf://{REPO}{revision}")
    point_to(monkeypatch, "http://127.0.0.1:9")

    assert make_sources().fetch(f"hf://{REPO}{revision}") == folder
    assert make_sources().stamp(f"hf://{REPO}{revision}") == ""


@pytest.mark.parametrize(
    ("is_offline", "reason"),
    [(False, f"fetching hf://{REPO}: .*refused"), (True, "HF_HUB_OFFLINE")],
)
def test_without_a_network_nothing_new_is_fetched(
    is_offline: bool, reason: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)

    with pytest.raises(Unavailable, match=reason):
        make_sources().fetch(f"hf://{REPO}")


def test_a_new_commit_is_fetched(hub: Hub, tmp_path: Path) -> None:
    before = make_sources().fetch(f"hf://{REPO}")
    stamp = make_sources().stamp(f"hf://{REPO}")
    assert stamp == hub.commit

    hub.put(write_adapter(tmp_path / "written", tensors=make_tensors(value=2.0)))

    assert make_sources().stamp(f"hf://{REPO}") not in ("", stamp)
    (update,) = read_adapter(
        make_sources().fetch(f"hf://{REPO}"), SHAPES, AS_NAMED
    ).updates.values()
    assert float(update.a[0, 0]) == 2.0
    (old,) = read_adapter(before, SHAPES, AS_NAMED).updates.values()
    assert float(old.a[0, 0]) == 1.0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("hf://me/nobody", "HF_TOKEN"),
        (f"hf://{REPO}@v9", "has no revision v9"),
        ("hf://me/a--b", "not a valid repository name"),
    ],
)
def test_a_repository_that_is_not_there_is_told(source: str, reason: str, hub: Hub) -> None:
    with pytest.raises(InvalidAdapter, match=reason):
        make_sources().fetch(source)


@pytest.mark.parametrize(
    ("name", "instead", "reason"),
    [
        (WEIGHTS, {}, f"{WEIGHTS} is not there"),
        (CONFIG, {}, f"{CONFIG} is not there"),
        (WEIGHTS, {WEIGHTS: bytes(MAX_BYTES + 1)}, f"at most {MAX_BYTES} are read"),
        (WEIGHTS, {PICKLES[0]: b""}, "a pickle"),
    ],
)
def test_a_broken_repository_is_refused_before_anything_is_fetched(
    name: str, instead: dict[str, bytes], reason: str, hub: Hub
) -> None:
    del hub.files[name]
    hub.files |= instead

    with pytest.raises(InvalidAdapter, match=reason):
        make_sources().fetch(f"hf://{REPO}")

    assert hub.fetched == []


def test_a_snapshot_may_not_lead_out_of_its_cache(hub: Hub, tmp_path: Path) -> None:
    folder = make_sources().fetch(f"hf://{REPO}")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(tmp_path / "written" / WEIGHTS)

    with pytest.raises(InvalidAdapter, match="leads out"):
        make_sources().fetch(f"hf://{REPO}")
    with pytest.raises(InvalidAdapter, match="leads out"):
        read_adapter(folder, SHAPES, AS_NAMED)


def test_a_snapshot_named_as_a_folder_is_read_only_with_its_links_inside(hub: Hub) -> None:
    """Who names a snapshot by its path means a folder; the cache's own name for it is hf://."""
    folder = make_sources().fetch(f"hf://{REPO}")

    with pytest.raises(InvalidAdapter, match="hf://OWNER/NAME"):
        Sources(named=[str(folder)]).fetch(str(folder))
