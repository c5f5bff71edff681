"""`remora ps`: rows from Serve's status, and what is said if no cluster answers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from remora.configs.load import IMPORT_PATH
from remora.deployments.cli.main import app
from remora.deployments.cli.models.running import rows_of


def application(*models: str, **deployments: Any) -> dict[str, Any]:
    entries = [{"model": {"path": name}} for name in models]
    return {
        "name": "remora",
        "status": "RUNNING",
        "route_prefix": "/",
        "deployed_app_config": {
            "import_path": IMPORT_PATH,
            "args": entries[0] if len(entries) == 1 else {"models": entries},
        },
        "deployments": deployments,
    }


def replicas(target: int, *states: str, load: float | None = None) -> dict[str, Any]:
    detail = None if load is None else {"metrics": {"requests": load}}
    found = [{"state": state} for state in states]
    return {"target_num_replicas": target, "replicas": found, "autoscaling_detail": detail}


def rows(of: dict[str, Any]) -> list[tuple[str, ...]]:
    return list(rows_of(of, lambda route: f"from {route}"))


def test_a_model_has_a_row_with_its_replicas_and_load() -> None:
    one = application("me/tiny@v1", LLMServer=replicas(1, "RUNNING"))
    assert rows(one) == [("remora", "RUNNING", "me/tiny", "me/tiny@v1", "1 running", "from /")]
    scaled = application("/m/tiny", LLMServer=replicas(3, "RUNNING", "STARTING", load=7))
    assert rows(scaled)[0][2:] == ("tiny", "/m/tiny", "1 running, 1 starting of 3", "7 requests")


def test_several_models_have_a_row_each() -> None:
    names = {"LLMServer-a": replicas(1, "RUNNING"), "LLMServer-b": replicas(1)}
    found = rows(application("/a", "/b", **names))

    assert [row[2:] for row in found] == [
        ("a", "/a", "1 running", "-"),
        ("b", "/b", "none of 1", "-"),
    ]


def test_an_application_of_another_kind_is_shown_without_a_model() -> None:
    other = application("/a") | {"deployed_app_config": {"import_path": "x:y", "args": {}}}

    assert rows(other) == [("remora", "RUNNING", "-", "-", "-", "-")]


def test_the_dashboard_gets_ray_s_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_allowed = self.headers["Authorization"] == "Bearer secret"
            one = application("/tiny", LLMServer=replicas(2, "RUNNING", "RUNNING"))
            body = json.dumps({"applications": {"remora": one}}).encode()
            self.send_response(200 if is_allowed else 401)
            self.end_headers()
            self.wfile.write(body if is_allowed else b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    arguments = ["ps", "--dashboard", f"http://127.0.0.1:{server.server_port}"]
    try:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
        refused = CliRunner().invoke(app, arguments)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
        shown = CliRunner().invoke(app, arguments)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

    assert refused.exit_code == 2
    assert "RAY_AUTH_TOKEN" in refused.stderr
    assert shown.exit_code == 0
    assert "2 running" in shown.stdout.splitlines()[1]


def test_without_a_cluster_the_command_says_how_to_start_one() -> None:
    result = CliRunner().invoke(app, ["ps", "--dashboard", "http://127.0.0.1:9"])

    assert result.exit_code == 2
    assert "remora serve" in result.stderr
