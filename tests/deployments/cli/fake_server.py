"""A server that answers by script, on a free port of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STOP = "data: [DONE]\n\n"


def chat_event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def text_event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'text': text}]})}\n\n"


@dataclass
class FakeServer:
    """`answers` are given in order, one per POST: (status, body). `received` holds the bodies."""

    answers: list[tuple[int, str]]
    models: tuple[str, ...] = ("tiny",)
    received: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.keys.append(self.headers["authorization"])
            self._reply(200, json.dumps({"data": [{"id": name} for name in fake.models]}))

        def do_POST(self) -> None:
            fake.keys.append(self.headers["authorization"])
            body = self.rfile.read(int(self.headers["Content-Length"]))
            fake.received.append({"path": self.path, **json.loads(body)})
            self._reply(*fake.answers.pop(0))

        def _reply(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
