"""What a chunk of a streamed chat costs between the engine's client and the socket.

    python tests/benchmarks/reply_chunks.py [--rounds 9]

A fake engine client answers POST /v1/chat/completions with 20,000 one-token outputs; the ASGI
application parses the body, tracks the request, parses reasoning and tool calls, and sends bytes to
a sink. Prints microseconds per chunk, minimum and median of the rounds, of process CPU time and of
wall time: with both parsers and with none, as one stream and as 8 interleaved streams.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, not by pytest

from starlette.types import ASGIApp

from remora.engine.types import FinishReason, Output, Request
from tests.deployments.fakes import FakeEngine, FakeServer, make_app, make_config

NUM_CHUNKS = 20_000
NUM_STREAMS = 8
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@dataclass
class Replay(FakeEngine):
    """An engine client whose outputs exist before they are asked for.

    yields:  whether the event loop takes a turn after each output, so that streams interleave
    """

    outputs: list[Output] = field(default_factory=list)
    yields: bool = False

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        for output in self.outputs:
            if self.yields:
                await asyncio.sleep(0)
            yield output


def make_outputs(num: int) -> list[Output]:
    """Return a reply that is half reasoning and half answer, one token per output."""
    texts = ["<think>", "\n", *(" mind",) * (num // 2 - 4), "\n", "</think>", "\n\n"]
    texts += [" word"] * (num - len(texts))
    return [
        Output(
            index=0,
            token_ids=(ord(text[-1]),),
            text=text,
            finish_reason=FinishReason.STOP if place == num else None,
            num_output_tokens=place,
        )
        for place, text in enumerate(texts, 1)
    ]


def make_body(*, parses: bool) -> bytes:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if parses:
        body["tools"] = [{"type": "function", "function": TOOL}]
    return json.dumps(body).encode()


async def ask(app: ASGIApp, body: bytes) -> int:
    """Send one request; return how many messages came back."""
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    num_sent = 0
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        return await asyncio.get_running_loop().create_future()  # the client stays

    async def send(message: Any) -> None:
        nonlocal num_sent
        num_sent += message["type"] == "http.response.body"

    await app(scope, receive, send)
    return num_sent


async def round_s(num_streams: int, *, parses: bool) -> tuple[float, float]:
    """Return seconds per chunk, of CPU and of wall time."""
    num_chunks = NUM_CHUNKS // num_streams
    engine = Replay(outputs=make_outputs(num_chunks), yields=num_streams > 1)
    api = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    off = {"tool_parser": "none", "reasoning_parser": "none"}
    app = make_app(FakeServer(client=engine, config=make_config(**(api if parses else off))))
    body = make_body(parses=parses)
    await ask(app, body)
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    sent = await asyncio.gather(*(ask(app, body) for _ in range(num_streams)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert min(sent) > 0.99 * num_chunks, f"of {num_chunks} chunks a stream: {sent}"
    return cpu / NUM_CHUNKS, wall / NUM_CHUNKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = range(parser.parse_args().rounds)
    for parses in (True, False):
        for num_streams in (1, NUM_STREAMS):
            taken = [asyncio.run(round_s(num_streams, parses=parses)) for _ in rounds]
            what = f"{'parsers' if parses else 'no parser'}, {num_streams} stream(s)"
            for name, seconds in zip(("cpu", "wall"), zip(*taken, strict=True), strict=True):
                low, middle = (1e6 * pick(seconds) for pick in (min, statistics.median))
                print(f"{what:24}{name:>5}: {low:6.2f} min {middle:6.2f} median us/chunk")


if __name__ == "__main__":
    main()
