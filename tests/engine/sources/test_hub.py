"""Models of the hub: what is fetched, what an interruption costs, and the error if nothing is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from pydantic import ValidationError

from remora.configs.errors import ConfigError
from remora.configs.model_names import HubModel
from remora.configs.sections.model import ModelSection
from remora.engine.models import locate
from remora.engine.models.locate import locate_model, locate_tokenizer
from remora.engine.sources import hub as source
from remora.engine.sources.inventory import cached_models, remove
from remora.engine.sources.models import Wanted, pinned
from remora.engine.weights import resolve_model as resolver
from remora.engine.weights.resolve_model import resolve_model
from tests.engine.sources.hub_server import OFFLINE_ADDRESS, TOKEN, Hub, point_to, serving_hub

REPO = "me/tiny"
SHARDS = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
LARGE = 300 * 2**10  # continues after an interruption


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(resolver, "_resolved", {})
    monkeypatch.setattr(source, "_RESUMED_BYTES", LARGE)
    with serving_hub(REPO, tmp_path / "hub", monkeypatch) as hub:
        index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
        hub.files = {
            "config.json": b"{}",
            "tokenizer.json": b"{ }",
            "model.safetensors.index.json": json.dumps(index).encode(),
            SHARDS[0]: bytes(LARGE),
            SHARDS[1]: b"small",
            "consolidated.safetensors": bytes(LARGE),
            "original/model.safetensors": b"again",
            "pytorch_model.bin": b"again",
            "README.md": b"not for us",
        }
        yield hub


def resolve(name: str = REPO, wanted: Wanted = resolver.WHOLE) -> Path:
    resolver._resolved.clear()
    return resolve_model(name, Path("no-cache"), wanted)


def refusal(name: str = REPO) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(name)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_only_what_serving_needs_is_fetched_and_only_once(hub: Hub) -> None:
    folder = resolve()

    needed = ["config.json", *SHARDS, "model.safetensors.index.json", "tokenizer.json"]
    assert sorted(file.name for file in folder.iterdir()) == sorted(needed)
    assert (folder / SHARDS[0]).stat().st_size == LARGE
    assert resolve(f"hf://{REPO}@main") == folder == resolve(f"{REPO}@{hub.commit}")
    assert sorted(hub.fetched) == sorted(needed)


@pytest.mark.observes("model.download_dir")
def test_a_folder_for_downloads_replaces_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "check_served", lambda model, folder: None)
    place = tmp_path / "downloads"
    model = ModelSection(path=REPO, tokenizer_path=f"{REPO}@main", download_dir=str(place))

    folder = locate_model(model)

    assert folder == place / "models--me--tiny" / "snapshots" / hub.commit
    assert (folder / SHARDS[0]).stat().st_size == LARGE
    assert not any(Path(constants.HF_HUB_CACHE).glob("models--*"))
    point_to(monkeypatch, OFFLINE_ADDRESS)
    resolver._resolved.clear()
    assert locate_model(model) == folder
    assert pinned(HubModel("me", "tiny"), place).revision == hub.commit
    assert locate_tokenizer(model) == folder


def test_what_a_folder_for_downloads_lacks_is_said_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, OFFLINE_ADDRESS)
    model = ModelSection(path=REPO, download_dir=str(tmp_path / "downloads"))

    with pytest.raises(ConfigError) as refused:
        locate_model(model)

    assert f"the cache {tmp_path / 'downloads'}" in str(refused.value)
    assert "set model.download_dir to" in str(refused.value)
    with pytest.raises(ValidationError, match="absolute"):
        ModelSection(path=REPO, download_dir="downloads")


def test_a_check_refuses_before_weights_are_fetched(hub: Hub) -> None:
    def check(folder: Path) -> None:
        assert (folder / "config.json").is_file()
        raise ConfigError("no such architecture")

    with pytest.raises(ConfigError, match="no such architecture"):
        resolve(wanted=Wanted(check=check))

    assert not set(SHARDS) & set(hub.fetched)


def test_a_download_that_was_killed_continues(hub: Hub, tmp_path: Path) -> None:
    hub.stops_after = 200 * 2**10
    program = (
        "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 2**16; "
        f"from remora.engine.sources import hub; hub._RESUMED_BYTES = {LARGE}; "
        "from pathlib import Path; from remora.engine.weights.resolve_model import resolve_model; "
        f"resolve_model({REPO!r}, Path('no-cache'))"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "hub")},
    )
    assert hub.stalled.wait(250)
    (part,) = _wait_for_part(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    arrived = part.stat().st_size
    hub.stops_after = None
    hub.fetched.clear()
    hub.ranges.clear()

    folder = resolve()

    assert (folder / SHARDS[0]).read_bytes() == bytes(LARGE)
    assert dict(zip(hub.fetched, hub.ranges, strict=True))[SHARDS[0]] == f"bytes={arrived}-"
    assert list(tmp_path.rglob("*.part")) == []


def _wait_for_part(folder: Path) -> list[Path]:
    while not (found := [p for p in folder.rglob("*.part") if p.stat().st_size]):
        pass
    return found


def test_a_damaged_part_is_fetched_anew(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.engine.sources.retry.PAUSES_S", (0,))
    etag = hashlib.sha256(hub.files[SHARDS[0]]).hexdigest()
    part = Path(constants.HF_HUB_CACHE) / "models--me--tiny" / "blobs" / f"{etag}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"damaged")

    assert (resolve() / SHARDS[0]).read_bytes() == bytes(LARGE)


def test_a_disk_that_is_too_small_is_noticed_before(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    small = usage._replace(free=200 * 2**10)
    monkeypatch.setattr("remora.engine.sources.models.shutil.disk_usage", lambda path: small)

    text = refusal()

    assert "me/tiny" in text
    assert "needs 300 KiB" in text
    assert "200 KiB free" in text
    assert "HF_HOME" in text
    assert not set(SHARDS) & set(hub.fetched)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (f"{REPO}@v9", ("no revision v9", "a branch, a tag or a commit")),
        ("me/nothing", ("has no hf://me/nothing", "HF_TOKEN")),
        ("me/a--b", ("not a valid repository name",)),
    ],
)
def test_a_name_that_means_nothing_gets_one_line(name: str, parts: tuple[str, ...]) -> None:
    text = refusal(name)

    assert all(part in text for part in parts)


def test_gated_and_private_models_name_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = True
    assert f"accept its conditions at {hub.address}/{REPO}" in refusal()
    hub.gated, hub.private = False, True
    assert "it is private and needs HF_TOKEN" in refusal()
    hub.gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    assert "the token in use may not read it" in refusal()

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (resolve() / "config.json").is_file()


@pytest.mark.parametrize("is_offline", [True, False])
def test_without_a_network_the_cache_serves_and_is_named(
    is_offline: bool, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve()
    point_to(monkeypatch, OFFLINE_ADDRESS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)

    assert resolve() == folder
    text = refusal("me/other")
    for part in (constants.HF_HUB_CACHE, "HF_HOME", "remora pull me/other", "smollm2-135m"):
        assert part in text
    assert ("HF_HUB_OFFLINE" if is_offline else OFFLINE_ADDRESS) in text


def test_a_snapshot_that_lacks_a_shard_is_not_complete(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve()
    (folder / SHARDS[1]).unlink()
    point_to(monkeypatch, OFFLINE_ADDRESS)

    assert "is not complete in the cache" in refusal()


def test_a_pinned_name_keeps_its_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HubModel("me", "tiny")
    first = pinned(model)
    assert first == HubModel("me", "tiny", hub.commit)
    folder = resolve(first.text)

    hub.files["config.json"] = b'{"new": 1}'

    assert pinned(model).revision == hub.commit != first.revision
    assert resolve(first.text) == folder
    assert resolve() != folder
    point_to(monkeypatch, OFFLINE_ADDRESS)
    assert pinned(model).revision == hub.commit
    assert pinned(HubModel("me", "other")) == HubModel("me", "other")


def test_a_gguf_file_is_named_by_its_quantisation(hub: Hub) -> None:
    hub.files = {
        "README.md": b"",
        "tiny-Q4_K_M.gguf": b"four",
        "tiny-Q8_0.gguf": b"eight",
        "mmproj-tiny-Q8_0.gguf": b"not a model",
        "BF16/tiny-BF16-00001-of-00002.gguf": b"first",
        "BF16/tiny-BF16-00002-of-00002.gguf": b"second",
    }

    assert resolve(f"{REPO}:q4_k_m").read_bytes() == b"four"
    assert resolve(f"{REPO}@main:tiny-Q8_0.gguf").read_bytes() == b"eight"
    bf16 = resolve(f"{REPO}:BF16")
    assert [file.read_bytes() for file in sorted(bf16.parent.iterdir())] == [b"first", b"second"]
    assert "mmproj-tiny-Q8_0.gguf" not in hub.fetched
    assert "tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in refusal(f"{REPO}:Q2_K")
    assert f"{REPO}:tiny-BF16-00001-of-00002.gguf" in refusal()


def test_only_pickles_are_refused_unless_asked_for(hub: Hub) -> None:
    for name in [name for name in hub.files if name.endswith(("safetensors", "index.json"))]:
        del hub.files[name]

    assert "load_format: pt" in refusal()
    assert "pytorch_model.bin" not in hub.fetched
    assert (resolve(wanted=Wanted(weights="pickles")) / "pytorch_model.bin").is_file()


def test_caches_are_listed_and_removed_by_revision(hub: Hub, tmp_path: Path) -> None:
    old = resolve(f"{REPO}@{hub.commit}")
    hub.files["config.json"] = b'{"new": 1}'
    new = resolve()
    (new / SHARDS[1]).unlink()

    found = {each.name: each for each in cached_models(tmp_path)}

    assert set(found) == {REPO, f"{REPO}@{old.name[:12]}"}
    assert (found[REPO].is_complete, found[f"{REPO}@{old.name[:12]}"].is_complete) == (False, True)
    assert found[f"{REPO}@{old.name[:12]}"].num_bytes > LARGE
    assert remove(HubModel("me", "tiny", new.name), tmp_path) == len(b'{"new": 1}')
    assert (old / SHARDS[0]).is_file()
    assert remove(HubModel("me", "tiny"), tmp_path) > LARGE
    assert cached_models(tmp_path) == []
    assert remove(HubModel("me", "tiny"), tmp_path) == 0


def test_gguf_files_are_listed_and_removed_one_by_one(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"tiny-Q4_K_M.gguf": b"four", "tiny-Q8_0.gguf": b"eight"}
    resolve(f"{REPO}:Q4_K_M")
    resolve(f"{REPO}:Q8_0")

    names = [each.name for each in cached_models(tmp_path)]

    assert names == [f"{REPO}:tiny-Q4_K_M.gguf", f"{REPO}:tiny-Q8_0.gguf"]
    assert remove(HubModel("me", "tiny", None, "Q4_K_M"), tmp_path) == len(b"four")
    assert [each.name for each in cached_models(tmp_path)] == names[1:]
