"""Adapters of the Hugging Face hub: a hub of our own on loopback, and then none at all."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from remora.configs.errors import InvalidAdapter, Unavailable
from remora.lora.adapter import read_adapter
from remora.lora.files import CONFIG, PICKLES, WEIGHTS
from remora.lora.sources import Sources
from tests.lora.peft_files import AS_NAMED, SHAPES, make_tensors, write_adapter

MAX_BYTES = 100_000
REPO = "me/pirate"


class Hub:
    """What a hub holds of one repository; `fetched` are paths of files that were asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.address = ""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def put(self, folder: Path) -> None:
        for file in folder.iterdir():
            self.files[file.name] = file.read_bytes()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        of_repo = f"/api/models/{REPO}"
        if path in (of_repo, f"{of_repo}/revision/main", f"{of_repo}/revision/{self.commit}"):
            files = [{"rfilename": name, "size": len(held)} for name, held in self.files.items()]
            return self._json({"id": REPO, "sha": self.commit, "siblings": files})
        if path.startswith(f"{of_repo}/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if path == f"{of_repo}/tree/{self.commit}":
            sizes = [(name, len(held)) for name, held in self.files.items()]
            return self._json(
                [
                    {"type": "file", "path": name, "size": size, "oid": f"{size:040}"}
                    for name, size in sizes
                ]
            )
        name = path.rpartition("/")[2]
        if path.startswith(f"/{REPO}/resolve/{self.commit}/") and name in self.files:
            content = self.files[name]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return 200, {"ETag": etag, "X-Repo-Commit": self.commit}, content
        return 401, {"X-Error-Code": "RepoNotFound"}, b""

    def _json(self, value: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.reply(has_body=False)

        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                hub.fetched.append(self.path.rpartition("/")[2])
            self.reply(has_body=True)

        def reply(self, *, has_body: bool) -> None:
            status, headers, body = hub.answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    point_to(monkeypatch, hub.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.put(write_adapter(tmp_path / "written"))
    hub.files["README.md"] = b"not for us"
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def point_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )


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
