"""A small server that speaks OpenAI's streams over a real socket, in any chunking.

It answers by rule: `max_tokens` tokens, one an event, unless told otherwise.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

Answer = tuple[int, str, bytes]  # status, content type, body


def events(*payloads: Any, end: str = "\n", done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(payload)}{end}{end}" for payload in payloads]
    return "".join([*lines, f"data: [DONE]{end}{end}" if done else ""]).encode()


def completion_events(count: int, *, usage: bool = True, end: str = "\n") -> bytes:
    texts = [
        {"choices": [{"text": " x", "finish_reason": "length" if n == count - 1 else None}]}
        for n in range(count)
    ]
    tail = [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}}]
    return events(*texts, *(tail if usage else []), end=end)


def by_rule(path: str, body: dict[str, Any]) -> Answer:
    if path == "/v1/models":
        return 200, "application/json", b'{"data": [{"id": "tiny"}]}'
    if path == "/v1/completions":
        return 200, "text/event-stream", completion_events(body["max_tokens"])
    return 404, "application/json", b'{"error": {"message": "no such path"}}'


@dataclass
class FakeOpenAI:
    """`piece` bytes are written at a time, as HTTP chunks of their own; `headers` end in \\r\\n."""

    answer: Callable[[str, dict[str, Any]], Answer] = by_rule
    piece: int = 1 << 20
    cut_after: int | None = None
    headers: str = ""
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""
    port: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            lines = [line.partition(": ") for line in head.splitlines()[1:]]
            headers = {name.lower(): value for name, _, value in lines}
            length = int(headers.get("content-length", 0))
            body = json.loads(await reader.readexactly(length) or b"{}")
            self.received.append((path, body))
            self.keys.append(headers.get("authorization"))
            await self._reply(writer, *self.answer(path, body))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _reply(
        self, writer: asyncio.StreamWriter, status: int, kind: str, content: bytes
    ) -> None:
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n"
            f"{self.headers}Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        for start in range(0, len(content), self.piece):
            if self.cut_after is not None and start >= self.cut_after:
                return
            part = content[start : start + self.piece]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


F = TypeVar("F", bound=FakeOpenAI)


@contextmanager
def serving(fake: F) -> Iterator[F]:
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.handle, "127.0.0.1", 0))
    fake.port = server.sockets[0].getsockname()[1]
    fake.url = f"http://127.0.0.1:{fake.port}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(_close(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(server: asyncio.Server) -> None:
    server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
