"""An application of this process on a socket, for a browser."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.deployments.http.app import build_http_app
from remora.deployments.http.core.auth import Access
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import FakeServer


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: this is not the main thread."""
        yield


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve on a free port of this machine; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off")
        server = _Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def fake(server: FakeServer, *, access: Access | None = None, root: str = "") -> Iterator[str]:
    """Serve fakes, below a root path as Ray Serve does; yield the address without it."""
    given = access or Access(is_local=True)
    app = build_http_app(ServerState.over(server), access=lambda: given)

    async def below(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": root}, receive, send)

    with served(below) as url:
        yield url
