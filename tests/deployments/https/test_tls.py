"""The files of `http_options` for HTTPS: what is refused, and when new ones are installed."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from remora.configs.errors import ConfigError
from remora.deployments.cli.haproxy.choice import Proxy
from remora.deployments.cli.serve import tls_of
from remora.deployments.tls import Renewal, Tls
from tests.deployments.https.certificates import Authority, Issued, write_key


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return Authority(tmp_path).issue("server")


def touch_as_new(*paths: Path) -> None:
    """Make files look replaced, whatever the resolution of the clock."""
    for path in paths:
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000_000))


def test_without_files_the_server_speaks_plain_http() -> None:
    assert Tls.of({"host": "127.0.0.1", "ssl_certfile": None}) is None


def test_files_that_belong_together_are_taken(issued: Issued, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "clients")
    tls = Tls.of(issued.http_options | {"ssl_ca_certs": str(authority.path)})

    assert tls is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load(context)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_half_of_it_is_refused(name: str, issued: Issued) -> None:
    with pytest.raises(ConfigError, match=rf"^http_options\.{name}: .*ssl_"):
        Tls.of({name: str(issued.certificate)})


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_file_that_is_missing_is_named(name: str, issued: Issued, tmp_path: Path) -> None:
    options = issued.http_options | {name: str(tmp_path / "none.pem")}
    with pytest.raises(ConfigError, match=rf"^http_options\.{name} = .*none\.pem: No such file"):
        Tls.of(options)


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_file_of_another_kind_is_named(name: str, issued: Issued, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("no PEM\n")
    with pytest.raises(ConfigError, match=r"other\.pem"):
        Tls.of(issued.http_options | {name: str(other)})


def test_a_key_of_another_certificate_is_refused(issued: Issued, tmp_path: Path) -> None:
    other = Authority(tmp_path, "others").issue("other")
    with pytest.raises(ConfigError, match=r"ssl_keyfile = .*other\.key is the key of another"):
        Tls.of(issued.http_options | {"ssl_keyfile": str(other.key)})


def test_a_passphrase_is_refused_with_the_way_to_do_without(issued: Issued) -> None:
    with pytest.raises(ConfigError, match=r"ssl_keyfile_password: the key .*openssl pkey") as given:
        Tls.of(issued.http_options | {"ssl_keyfile_password": "hidden"})
    assert "hidden" not in str(given.value)
    write_key(issued.key, ec.generate_private_key(ec.SECP256R1()), b"hidden")
    with pytest.raises(ConfigError, match=r"ssl_keyfile: .* is encrypted.*openssl pkey"):
        Tls.of(issued.http_options)


def test_haproxy_gets_the_files_instead_of_serve(issued: Issued) -> None:
    raw = {"http_options": {"port": 1, **issued.http_options}}
    tls = tls_of(raw, Proxy.HAPROXY)

    assert tls is not None
    assert raw["http_options"] == {"port": 1}


def test_serves_own_proxy_is_refused_where_clients_need_certificates(issued: Issued) -> None:
    raw = {"http_options": {**issued.http_options, "ssl_ca_certs": str(issued.certificate)}}
    with pytest.raises(ConfigError, match="ssl_ca_certs: Serve's Python proxy does not check"):
        tls_of(raw, Proxy.PYTHON)


class Installing:
    """Counts installations, and keeps what the operator is told."""

    def __init__(self, tls: Tls) -> None:
        self.count = 0
        self.lines: list[str] = []
        self._renewal = Renewal(tls, self._install, self.lines.append)

    def _install(self) -> None:
        self.count += 1

    def look(self, times: int = 3) -> None:
        for _ in range(times):
            self._renewal.look()


def test_replaced_files_are_installed_once(issued: Issued) -> None:
    tls = Tls.of(issued.http_options)
    assert tls is not None
    installing = Installing(tls)
    installing.look()
    assert installing.count == 0

    touch_as_new(issued.certificate, issued.key)
    installing.look(1)
    assert installing.count == 0, "they may still be being written"
    installing.look()
    assert installing.count == 1
    assert installing.lines == [f"HTTPS uses the new files of {issued.certificate}"]


def test_files_that_cannot_be_used_are_reported_once_and_not_installed(
    issued: Issued, tmp_path: Path
) -> None:
    tls = Tls.of(issued.http_options)
    assert tls is not None
    installing = Installing(tls)
    good = issued.key.read_bytes()

    issued.key.unlink()
    installing.look()
    assert installing.lines == [], "it may come back in a moment"
    issued.key.write_text("no key")
    installing.look()
    assert installing.count == 0
    (line,) = installing.lines
    assert line.startswith("warning: HTTPS keeps its certificate: http_options.ssl_certfile")

    issued.key.write_bytes(good)
    installing.look()
    assert installing.count == 1
