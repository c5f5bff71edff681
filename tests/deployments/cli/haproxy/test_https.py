"""HAProxy with HTTPS: certificates of server and clients, and their exchange while it runs."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from remora.deployments.cli.haproxy.certificates import BUNDLE, renew_certificates
from remora.deployments.cli.haproxy.choice import BINARY
from remora.deployments.cli.haproxy.program import install_haproxy_program
from remora.deployments.free_ports import free_port
from remora.deployments.tls import Tls
from tests.deployments.cli.haproxy.needs import HAPROXY, HEAD
from tests.deployments.cli.haproxy.test_watch import until
from tests.deployments.https.certificates import Authority, serial_at

pytestmark = HAPROXY
CONFIG = (
    HEAD
    + """\
frontend {frontend}
    bind 127.0.0.1:{port}
    http-request return status 200 content-type text/plain lf-string %[req.hdr(x-forwarded-proto)]
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(BINARY, os.environ.get(BINARY, ""))  # restored afterwards
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "500.http").touch()
    return folder


def written(folder: Path, port: int, frontend: str = "http_frontend") -> list[str]:
    """Write a configuration; return the command that starts the program on it."""
    config = folder.parent / "haproxy.cfg"
    config.write_text(CONFIG.format(folder=folder, port=port, frontend=frontend))
    return [os.environ[BINARY], "-db", "-f", str(config), "-dR"]


@contextmanager
def running(folder: Path, tls: Tls) -> Iterator[int]:
    """Run HAProxy in the block; yield its port."""
    install_haproxy_program(folder, host="127.0.0.1", body_timeout_s=5, tls=tls)
    port = free_port()
    process = subprocess.Popen(written(folder, port))

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens)
        yield port
    finally:
        process.kill()
        process.wait()


def get(port: int, context: ssl.SSLContext) -> str:
    return httpx.get(f"https://127.0.0.1:{port}/", verify=context).text


def test_the_port_speaks_https_only(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = Tls.of(authority.issue("server").http_options)
    assert tls is not None

    with running(folder, tls) as port:
        assert get(port, authority.context()) == "https", "replicas learn the scheme"
        with pytest.raises(httpx.ConnectError, match=r"self-signed|unable to get"):
            get(port, ssl.create_default_context())
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/")
    assert (folder / BUNDLE).stat().st_mode & 0o777 == 0o600


def test_clients_need_a_certificate_of_the_authorities(folder: Path, tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    options = authority.issue("server").http_options
    tls = Tls.of(options | {"ssl_ca_certs": str(clients.path)})
    assert tls is not None

    with running(folder, tls) as port:
        assert get(port, authority.context(clients.issue("client"))) == "https"
        for own in (None, authority.issue("stranger")):
            with pytest.raises(httpx.TransportError):
                get(port, authority.context(own))

        others = Authority(tmp_path, "others")
        clients.path.write_bytes(others.path.read_bytes())
        renew_certificates(folder, tls)
        assert get(port, authority.context(others.issue("other"))) == "https"
        with pytest.raises(httpx.TransportError):
            get(port, authority.context(clients.issue("client")))


def test_new_connections_get_a_renewed_certificate(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first = authority.issue("server")
    tls = Tls.of(first.http_options)
    assert tls is not None

    with running(folder, tls) as port, httpx.Client(verify=authority.context()) as client:
        assert client.get(f"https://127.0.0.1:{port}/").text == "https"
        assert serial_at(port, authority.context()) == first.serial
        second = authority.issue("server")
        renew_certificates(folder, tls)
        assert serial_at(port, authority.context()) == second.serial != first.serial
        assert client.get(f"https://127.0.0.1:{port}/").text == "https"


def test_a_renewal_that_haproxy_refuses_is_an_error(folder: Path, tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue("server")
    tls = Tls.of(issued.http_options)
    assert tls is not None

    with running(folder, tls):
        issued.key.write_text("no key")
        with pytest.raises(OSError, match="HAProxy answers"):
            renew_certificates(folder, tls)


def test_haproxy_does_not_start_without_the_https_that_was_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    tls = Tls.of(Authority(tmp_path).issue("server").http_options)
    install_haproxy_program(folder, host="127.0.0.1", body_timeout_s=5, tls=tls)

    command = written(folder, 1, frontend="named_differently")
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert "HTTPS cannot be added" in ended.stderr
