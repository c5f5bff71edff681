"""`remora lora` against a server that answers by script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from remora.deployments.cli.lora import _row
from remora.deployments.cli.main import app
from tests.deployments.cli.fake_server import FakeServer

MakeServer = Callable[..., FakeServer]
DONE = (200, json.dumps({"success": True}))


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["lora", *args])
    return result.exit_code, result.output


def test_an_adapter_is_added_by_its_whole_path(make_server: MakeServer) -> None:
    server = make_server(DONE, DONE)

    assert run("add", "pirate", "here", "--pin", "--url", server.url)[0] == 0
    assert run("add", "far", "hf://me/far", "--replace", "--url", server.url)[0] == 0

    first, second = server.posts
    assert first == {
        "path": "/load_lora_adapter",
        "lora_name": "pirate",
        "lora_path": str(Path("here").absolute()),
        "pinned": True,
        "load_inplace": False,
    }
    assert (second["lora_path"], second["load_inplace"]) == ("hf://me/far", True)


def test_rm_pin_and_unpin(make_server: MakeServer) -> None:
    server = make_server(DONE, DONE, DONE)

    assert run("rm", "pirate", "--force", "--url", server.url)[0] == 0
    assert run("pin", "pirate", "--url", server.url, "--api-key", "k")[0] == 0
    assert run("unpin", "pirate", "--url", server.url, "--model", "a b")[0] == 0

    assert server.posts == [
        {"path": "/unload_lora_adapter", "lora_name": "pirate", "force": True},
        {"path": "/v1/lora_adapters/pirate/pin"},
        {"path": "/v1/lora_adapters/pirate/unpin?model=a%20b"},
    ]
    assert server.keys == [None, "Bearer k", None]


def test_a_refusal_is_shown(make_server: MakeServer) -> None:
    refusal = json.dumps({"error": {"message": "its rank is 70"}})

    code, output = run("add", "x", "/x", "--url", make_server((400, refusal)).url)

    assert code != 0
    assert "its rank is 70" in output


def test_rows_of_ls() -> None:
    replicas = {"r1": {"state": "loaded"}, "r2": {"state": "known"}}
    loaded = {"name": "a", "owner": "api", "source": "/a", "pinned": True, "replicas": replicas}
    refused = {"name": "b", "owner": "repo", "refused": "truncated"}

    row = _row({**loaded, "num_users": 1, "num_uses": 5})

    assert row == ("a", "loaded 1, known 1", "1", "5", "yes", "api", "/a")
    assert _row(refused) == ("b", "refused", "-", "-", "no", "repo", "truncated")
