"""The edits of the files that Serve writes for HAProxy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from remora.deployments.cli.haproxy.choice import BINARY
from remora.deployments.cli.haproxy.program import install_haproxy_program
from tests.deployments.serve_files import haproxy_config, routing_script

UNKNOWN = (
    """http-request return status 404 content-type text/plain lf-string "Path '%[path]'..."\n"""
)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Serve's files; the program is made, and HAProxy says how it was called."""
    binary = tmp_path / "haproxy"
    binary.write_text('#!/bin/sh\necho ran "$@"\n')
    binary.chmod(0o755)
    monkeypatch.setenv(BINARY, str(binary))
    ours = tmp_path / "ours"
    ours.mkdir()
    install_haproxy_program(ours, host="127.0.0.1", body_timeout_s=2.5)
    node = tmp_path / "node"
    node.mkdir()
    (node / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
    return node


def start(node: Path, config: str) -> str:
    """Start the program on a configuration; return what it has made of that."""
    path = node / "haproxy.cfg"
    path.write_text(config)
    command = [os.environ[BINARY], "-db", "-f", str(path), "-sf", "7"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output == f"ran -db -f {path} -sf 7\n"
    return path.read_text()


@pytest.mark.parametrize(
    ("routes", "status", "retriable"), [("", 503, "true"), ("  use_backend x if y\n", 404, "false")]
)
def test_haproxys_own_errors_get_our_shape(
    node: Path, routes: str, status: int, retriable: str
) -> None:
    config = start(node, f"{routes}backend default_backend\n    {UNKNOWN}")

    line = config.splitlines()[-1]
    assert f"return status {status} content-type application/json" in line
    assert f"x-should-retry {retriable}" in line
    head, body = (node / "500.http").read_bytes().split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head
    assert f"content-length: {len(body)}".encode() in head
    assert b'"type":"overloaded_error"' in body


def test_a_request_goes_on_without_the_routing_service_and_has_the_time_that_bodies_have(
    node: Path,
) -> None:
    before = haproxy_config()

    after = start(node, before)

    assert "Ingress request router failed" in before
    assert "Ingress request router failed" not in after
    assert "use_backend http-app-via-ingress-request-router if is_http-app { var(txn.via" in after
    assert "use_backend http-app if is_http-app\n" in after
    assert (
        '"unknown_replica_id"'
        not in after.split("backend default_backend")[0].split("use_backend")[-1]
    )
    assert "timeout client 3600s\n    timeout http-request 20000ms\n" in after
    assert "option splice-request" in before
    assert "option splice-request" not in after
    assert "wait-for-body time 5s if METH_POST" in before
    assert "wait-for-body time 2500ms if !{ path_end /files } METH_POST" in after
    (page,) = [line.split()[2] for line in after.splitlines() if " errorfile 408 " in line]
    assert "timeout_error" in Path(page).read_text()


def test_counters_can_be_read_where_the_server_can(node: Path) -> None:
    before, after = haproxy_config(), start(node, haproxy_config())

    def binds(config: str) -> list[str]:
        return [line.split()[1] for line in config.splitlines() if line.split()[:1] == ["bind"]]

    everywhere = [bind for bind in binds(before) if bind.startswith((":", "*:"))]
    assert len(everywhere) == 2
    local = [f"127.0.0.1:{bind.rpartition(':')[2]}" for bind in everywhere]
    assert sorted(binds(after)) == sorted({*binds(before)} - {*everywhere} | {*local})


def test_the_routing_service_gets_the_path_and_the_headers(node: Path) -> None:
    written = node / "ingress_request_router.lua"
    written.write_text(routing_script())

    start(node, "")
    once = written.read_text()
    start(node, "")

    assert "call_router(router, body, truncated, session_id, (request_id or" in once
    assert once.index("local function further_headers(txn)") < once.index(".. further_headers(txn)")
    assert "local function call_router(router, body, truncated_length, session_id, request_id)" in (
        once
    )
    assert written.read_text() == once
