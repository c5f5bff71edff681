"""The client of the compiler process: starts, queries and replaces it.

Calls block and may come from any number of threads. The process reports failures of its children; a
process that ended or does not answer is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from remora.configs.errors import EngineError
from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind
from remora.engine.grammar.frames import frame, receive
from remora.engine.grammar.prepare import Source, prepare
from remora.engine.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
COMMAND = (sys.executable, "-P", "-m", "remora.engine.grammar.worker")
# The limit is processor time. A child that sleeps is stopped after this multiple of the limit; it
# delays no other child, and a child that gets a tenth of a processor is still within it.
WALL_RATIO = 10
# Allowed delay of the process's answer.
GRACE_S = 5.0
# Typical sources, compiled when the process starts, so that one-time work is done by then.
_WARM_UP = Constraint(
    kind=ConstraintKind.JSON_SCHEMA,
    source='{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"integer"}}}',
)


class CompilerProcess:
    """Compiles sources in another process."""

    def __init__(self, section: GrammarSection, vocabulary: Vocabulary) -> None:
        self._timeout_s = section.compile_timeout_s
        self._wall_s = section.compile_timeout_s * WALL_RATIO
        self._greeting = frame(
            {
                "backend": section.backend,
                "is_compact": section.json_compact,
                "memory": section.compile_memory,
                "timeout_s": self._timeout_s,
                "wall_s": self._wall_s,
                "vocabulary": vocabulary.to_json(),
                "warm_up": _request(prepare(_WARM_UP, section)),
            }
        )
        self._server: _Server | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the current or last process."""
        return None if self._server is None else self._server.pid

    def start(self) -> None:
        """Start the process if it is not running. Raises EngineError."""
        self._started()

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError, also for a timeout or crash of its child."""
        request = frame(_request(source))
        for _ in range(2):
            server = self._started()
            try:
                head, body = server.ask(request, self._wall_s + GRACE_S)
            except TimeoutError:
                server.end()
                raise ConstraintError(
                    f"it takes longer than {self._timeout_s:g} s (grammar.compile_timeout_s)",
                    limit="compile_timeout_s",
                    is_passing=True,
                ) from None
            except (OSError, EOFError) as error:  # closed by `close`, not a fault of the source
                logger.warning("grammar compiler %s is gone: %s", server.pid, error)
                server.end()
                continue
            if "error" in head:
                is_passing = head.get("is_passing", False)
                raise ConstraintError(head["error"], limit=head.get("limit"), is_passing=is_passing)
            return body
        raise EngineError("the grammar compiler ended twice while it was asked")

    def close(self) -> None:
        """End the process for good; waiting calls fail."""
        with self._lock:
            self._is_closed = True
            server = self._server
        if server is not None:
            server.end()

    def _started(self) -> _Server:
        """Return a running process, starting a new one if necessary."""
        with self._starting:
            server = self._server
            if server is not None and not server.has_ended:
                return server
            with self._lock:
                if self._is_closed:
                    raise EngineError("the grammar compiler has been closed")
                server = self._server = _Server()
            started = time.monotonic()
            try:
                server.ask(self._greeting, START_TIMEOUT_S)
            except (OSError, EOFError) as error:
                server.end()
                raise EngineError(f"the grammar compiler does not start: {error}") from error
            took_s = time.monotonic() - started
            logger.info("grammar compiler %s started in %.1f s", server.pid, took_s)
            return server


class _Server:
    """One process. When it ends, waiting calls get EOFError or OSError."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                # No session of its own: the kernel may apply niceness within sessions only.
                process_group=0,
            )
        self._lock = threading.Lock()
        self.pid = self._process.pid
        self.has_ended = False

    def ask(self, message: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Send a message and wait for the reply. Raises TimeoutError, OSError or EOFError."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                if self.has_ended:
                    raise EOFError("the process has been ended")
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            ours.settimeout(timeout_s)
            ours.sendall(message)
            return receive(ours, timeout_s)

    def end(self) -> None:
        """Kill the process and its children, and release its resources."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
            with contextlib.suppress(ProcessLookupError):  # already waited for by another thread
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._control.close()


def _request(source: Source) -> dict[str, str]:
    return {"kind": source.kind, "text": source.text}
