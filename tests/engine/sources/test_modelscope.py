"""Models of ModelScope: by URL, or by the names of repositories where a variable says so."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from remora.configs.errors import ConfigError
from remora.configs.model_names import HubModel
from remora.engine.sources.models import pinned
from remora.engine.weights import resolve_model as resolver
from remora.engine.weights.resolve_model import resolve_model

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": bytes(range(256)) * 8,
    "original/model.safetensors": b"again",
}
REPO = "/api/v1/models/me/tiny/repo"


class Scope:
    """What the server has; a large file loses its connection once after `breaks_after` bytes."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.breaks_after: int | None = None
        self.ranges: list[str] = []

    def answer(self, path: str, query: dict[str, list[str]]) -> bytes | None:
        if query.get("Revision") != ["master"]:
            return None
        if path == f"{REPO}/files":
            listed = [
                {"Path": name, "Type": "blob", "Size": len(content), "Sha256": _sum(content)}
                for name, content in self.files.items()
            ]
            listed.append({"Path": "original", "Type": "tree", "Size": 0})
            return json.dumps({"Code": 200, "Data": {"Files": listed}}).encode()
        return self.files.get(query["FilePath"][0]) if path == REPO else None


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def scope(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scope]:
    scope = Scope()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            content = scope.answer(address.path, parse_qs(address.query))
            first = 0
            if wanted := self.headers["Range"]:
                scope.ranges.append(wanted)
                first = int(wanted.removeprefix("bytes=").removesuffix("-"))
            self.send_response(404 if content is None else 206 if wanted else 200)
            body = (content or b"")[first:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            most = scope.breaks_after
            if most is not None and "safetensors" in self.path:
                body, scope.breaks_after = body[:most], None
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("MODELSCOPE_DOMAIN", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("remora.engine.sources.retry.time.sleep", lambda pause_s: None)
    monkeypatch.setattr(resolver, "_resolved", {})
    yield scope
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repository_is_named_by_its_url(tmp_path: Path) -> None:
    folder = resolve_model("modelscope://me/tiny", tmp_path)

    names = sorted(file.name for file in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_variable_makes_names_mean_modelscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")

    assert (resolve_model("me/tiny", tmp_path) / "config.json").is_file()
    assert pinned(HubModel("me", "tiny")) == HubModel("me", "tiny")


def test_a_gguf_file_of_a_repository(
    scope: Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    scope.files = {"README.md": b"", "tiny-Q4_K_M.gguf": b"four", "tiny-Q8_0.gguf": b"eight"}

    assert resolve_model("me/tiny:Q8_0", tmp_path).read_bytes() == b"eight"


def test_a_lost_connection_continues(scope: Scope, tmp_path: Path) -> None:
    scope.breaks_after = 700

    folder = resolve_model("modelscope://me/tiny", tmp_path)

    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert scope.ranges[-1] == "bytes=700-"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("modelscope://me/none", "has no modelscope://me/none at revision master"),
        ("modelscope://me/tiny@v9", "at revision v9"),
        ("modelscope://me", "expected modelscope://OWNER/NAME"),
    ],
)
def test_a_name_that_means_nothing_gets_one_line(url: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        resolve_model(url, tmp_path)
    assert "\n" not in str(refused.value)


def test_a_file_outside_of_the_folder_is_refused(scope: Scope, tmp_path: Path) -> None:
    scope.files["../config.json"] = b"{}"

    with pytest.raises(ConfigError, match="outside of its folder"):
        resolve_model("modelscope://me/tiny", tmp_path)
