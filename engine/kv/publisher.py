"""Publishes events of the prefix cache over ZeroMQ.

A message has three parts, as in vLLM's and SGLang's events: the topic, the message number (8 bytes,
big-endian), and a MessagePack list of the time, the events and the data-parallel rank; an event is
a list that begins with its kind. A thread packs and sends; the engine only queues events.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.kv.events import KVEvent, PagesRemoved, PagesStored

logger = logging.getLogger(__name__)

MAX_EVENTS = 1024  # of one message
LINGER_MS = 500
_KEY = "engine.kv_events_endpoint"


class Publisher:
    """Publishes events until closed. Raises ConfigError for an address that cannot be used."""

    def __init__(self, endpoint: str, topic: str, clock: Callable[[], float] = time.time) -> None:
        try:
            msgpack, zmq = import_module("msgpack"), import_module("zmq")
        except ImportError:
            raise ConfigError(
                f"{_KEY} needs the packages pyzmq and msgpack: pip install 'remora[kv-events]'"
            ) from None
        self._pack: Callable[[Any], bytes] = msgpack.packb
        self._topic = topic.encode()
        self._clock = clock
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            if "*" in endpoint:
                self._socket.bind(endpoint)
            else:
                self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"{_KEY}: {endpoint}: {error}") from None
        self._queue: SimpleQueue[KVEvent | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="remora-kv-events", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address that it is bound or connected to."""
        return str(self._socket.last_endpoint.decode())

    def emit(self, event: KVEvent) -> None:
        """Queue an event. Thread-safe."""
        self._queue.put(event)

    def close(self) -> None:
        """Send the queued events and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        number = 0
        is_open = True
        while is_open:
            events, is_open = self._next()
            if events:
                packed = self._pack([self._clock(), [_as_list(event) for event in events], 0])
                self._socket.send_multipart([self._topic, number.to_bytes(8), packed])
                number += 1
        self._socket.close()

    def _next(self) -> tuple[list[KVEvent], bool]:
        """Wait for an event; return all that are queued, and whether the publisher is open."""
        events: list[KVEvent] = []
        event = self._queue.get()
        while event is not None:
            events.append(event)
            if len(events) == MAX_EVENTS:
                return events, True
            try:
                event = self._queue.get_nowait()
            except Empty:
                return events, True
        return events, False


def _as_list(event: KVEvent) -> list[Any]:
    if isinstance(event, PagesStored):
        lora_id = event.lora_id or None
        hashes, tokens = list(event.hashes), list(event.tokens)
        return ["BlockStored", hashes, event.parent, tokens, event.page_size, lora_id]
    if isinstance(event, PagesRemoved):
        return ["BlockRemoved", list(event.hashes)]
    return ["AllBlocksCleared"]
