"""A server in one process without Ray: the replica's HTTP application behind uvicorn.

The replica is the same as Serve's, engine thread included. A stop signal closes the listening
socket and waits for open requests as long as `api.drain_timeout_s` allows; `draining.py` ends the
others with an error event. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from remora.configs.errors import EngineError
from remora.deployments.http.core.http_protocol import guard_connections
from remora.deployments.llm_server import LLMServer
from remora.deployments.local.host import LocalHost
from remora.deployments.local.settings import LocalSettings
from remora.deployments.tls import Renewal, Tls

HEALTH_PERIOD_S = 1.0
# Time for error events to reach clients after the drain timeout, or after the engine has failed.
FLUSH_S = 2.0

Report = Callable[[str], None]


def run_local(
    settings: LocalSettings, listener: socket.socket, *, show: Report, ready: Callable[[], None]
) -> None:
    """Serve until a stop signal. Raises ConfigError at the start, EngineError later.

    listener:  a bound socket, which listens once the server is ready
    show:      writes the banner, and a line when the server stops
    ready:     called when the server answers
    """
    guard_connections()
    server = _Uvicorn(
        uvicorn.Config(
            _no_application,
            lifespan="off",
            access_log=False,
            log_level="error",
            log_config=None,
            ws="none",
            root_path=settings.root_path,
            timeout_keep_alive=int(settings.keep_alive_s),
            timeout_graceful_shutdown=int(settings.config.api.drain_s + FLUSH_S),
            **_tls_options(settings.tls),
        )
    )
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(settings, server, listener, show, ready))


async def _serve(
    settings: LocalSettings,
    server: _Uvicorn,
    listener: socket.socket,
    show: Report,
    ready: Callable[[], None],
) -> None:
    host = LocalHost(settings.host, show)
    replica = LLMServer.__new__(LLMServer)  # its constructor is a coroutine, which Serve awaits
    await replica.__init__(settings.args, host=host)  # type: ignore[misc]
    try:
        server.config.app = replica.__serve_build_asgi_app__()
        _stop_on_signals(host, server, show)
        serving = asyncio.create_task(server.serve([listener]))
        listening = asyncio.create_task(server.is_listening.wait())
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():  # another process has begun to listen at the address
            listening.cancel()
            await serving
        ready()
        failure = await _until_end(replica, serving, _renewal(settings.tls, server, show))
        if failure is not None:
            server.config.timeout_graceful_shutdown = int(FLUSH_S)
            server.should_exit = True
            await serving
            raise failure
    finally:
        replica.__del__()  # as Serve does


def _tls_options(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    if tls.authorities is not None:
        options |= {"ssl_ca_certs": str(tls.authorities), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def _renewal(tls: Tls | None, server: _Uvicorn, show: Report) -> Renewal | None:
    """Return what makes new connections use new files."""
    context = server.config.ssl
    if tls is None or context is None:
        return None
    return Renewal(tls, lambda: tls.load(context), show)


async def _until_end(
    replica: LLMServer, serving: asyncio.Task[None], renewal: Renewal | None
) -> EngineError | None:
    """Wait until the server has ended, or the engine has failed; return the failure."""
    while not serving.done():
        if renewal is not None:
            renewal.look()
        try:
            await replica.check_health()
        except EngineError as error:
            return error
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(serving), HEALTH_PERIOD_S)
    await serving
    return None


def _stop_on_signals(host: LocalHost, server: _Uvicorn, show: Report) -> None:
    def stop(number: int) -> None:
        if host.is_stopping:
            os._exit(128 + number)
        host.is_stopping = True
        server.should_exit = True
        show("stopping: waiting for running requests to finish; press Ctrl-C again to stop now")

    stops = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        stops.append(signal.SIGHUP)
    for number in stops:
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the server."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.is_listening.set()


async def _no_application(*_: object) -> None:
    """Stand for the application, which is built after the event loop has begun."""
