"""A hub of our own on loopback: the routes that huggingface_hub's downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

OFFLINE_ADDRESS = "http://127.0.0.1:9"
TOKEN = "hf_of_a_reader"
Answer = tuple[int, dict[str, str], bytes]


class Hub:
    """A hub with one repository; large files are named by their SHA-256, as the real one does.

    fetched:     names of files that were asked for
    ranges:      the Range headers of those requests
    gated:       files need TOKEN; private: everything does
    stops_after: bytes of a large file after which the connection stalls, until `proceed` is set
    """

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.ranges: list[str | None] = []
        self.address = ""
        self.gated = self.private = False
        self.stops_after: int | None = None
        self.stalled, self.proceed = threading.Event(), threading.Event()

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(b"%d %s %d " % (len(name), name.encode(), len(content)) + content)
        return digest.hexdigest()

    def put(self, folder: Path) -> None:
        for file in folder.rglob("*"):
            if file.is_file():
                self.files[str(file.relative_to(folder))] = file.read_bytes()

    def answer(self, path: str, token: str | None) -> Answer:
        if self.private and token != TOKEN:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        of_repo = f"/api/models/{self.repo}"
        if path in (of_repo, f"{of_repo}/revision/main", f"{of_repo}/revision/{self.commit}"):
            files = [{"rfilename": name, "size": len(held)} for name, held in self.files.items()]
            return _json({"id": self.repo, "sha": self.commit, "siblings": files})
        if path.startswith(f"{of_repo}/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        start = f"/{self.repo}/resolve/{self.commit}/"
        name = path.removeprefix(start)
        if path.startswith(start) and name in self.files:
            if self.gated and token != TOKEN:
                return 403 if token else 401, {"X-Error-Code": "GatedRepo"}, b""
            content = self.files[name]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            headers = {"ETag": etag, "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
            return 200, headers, content
        return 401, {"X-Error-Code": "RepoNotFound"}, b""


def _json(value: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.reply(has_body=False)

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self.hub.fetched.append(self.path.rpartition("/")[2])
            self.hub.ranges.append(self.headers["Range"])
        self.reply(has_body=True)

    def reply(self, *, has_body: bool) -> None:
        authorization = self.headers["Authorization"] or ""
        token = authorization.removeprefix("Bearer ") or None
        status, headers, body = self.hub.answer(self.path.partition("?")[0], token)
        wanted = self.headers["Range"]
        if wanted and status == 200 and has_body:
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            status, body = 206, body[first:]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        most = self.hub.stops_after
        if has_body and most is not None and len(body) > most and "/resolve/" in self.path:
            self.wfile.write(body[:most])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.proceed.wait(60)
            self.close_connection = True
        elif has_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving_hub(repo: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve an empty repository, and point huggingface_hub to it and to a cache."""
    hub = Hub(repo)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    point_to(monkeypatch, hub.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield hub
    finally:
        hub.proceed.set()
        server.shutdown()
        thread.join()
        server.server_close()


def point_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Make an address huggingface_hub's hub."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
