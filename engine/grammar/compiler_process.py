"""The parent's side of the compiler process: one source at a time, within a time limit.

Blocking calls for one thread. A process that does not answer in time, or is gone, is replaced.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from remora.configs.errors import EngineError
from remora.configs.schema import GrammarSection
from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.frames import frame, frame_size, read_frame
from remora.engine.grammar.prepare import Source
from remora.engine.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
COMMAND = (sys.executable, "-P", "-m", "remora.engine.grammar.worker")
# The time limit is processor time, which the process keeps to itself; one that sleeps, or gets no
# processor, is given up after so many times the limit.
WALL_RATIO = 3
_READ_BYTES = 2**20


class CompilerProcess:
    """Compiles in another process. `compile` and `start` are for one thread; `close` for any."""

    def __init__(self, section: GrammarSection, vocabulary: Vocabulary) -> None:
        self._timeout_s = section.compile_timeout_s
        self._greeting = frame(
            {
                "backend": section.backend,
                "is_compact": section.json_compact,
                "memory": section.compile_memory,
                "timeout_s": section.compile_timeout_s,
                "vocabulary": vocabulary.to_json(),
            }
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process's id, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, if there is none. Raises EngineError."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with self._lock:
            if self._is_closed:
                raise EngineError("the grammar compiler has been closed")
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        try:
            head, _ = self._ask(self._greeting, START_TIMEOUT_S)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            raise EngineError(f"the grammar compiler does not start: {error}") from error
        logger.info("grammar compiler started, pid %s: %s", self.pid, head)

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError, also where it takes too long or crashes."""
        self.start()
        request = frame({"kind": source.kind, "text": source.text})
        try:
            head, body = self._ask(request, self._timeout_s * WALL_RATIO)
        except (OSError, EOFError, TimeoutError) as error:
            # Its own signal, not ours, which comes a moment later.
            status = self._end(wait_s=0.0 if isinstance(error, TimeoutError) else 1.0)
            if isinstance(error, TimeoutError) or status == -signal.SIGPROF:
                reason = f"takes longer than {self._timeout_s:g} s (grammar.compile_timeout_s)"
            else:
                reason = "takes more memory than grammar.compile_memory, or crashes the compiler"
            raise ConstraintError(f"compiling it {reason}") from None
        if "error" in head:
            raise ConstraintError(head["error"])
        return body

    def close(self) -> None:
        """End the process for good; a call that is waiting for it fails."""
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()

    def reap(self) -> None:
        """Give back what a closed process held. No other call may be under way."""
        self._end()

    def _ask(self, request: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Send a message and wait for the reply. Raises TimeoutError, OSError or EOFError."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        process.stdin.write(request)
        process.stdin.flush()
        received = bytearray()
        while (size := frame_size(received)) is None or len(received) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            piece = os.read(process.stdout.fileno(), _READ_BYTES)
            if not piece:
                raise EOFError("the process ended")
            received += piece
        message = read_frame(io.BytesIO(bytes(received)))
        assert message is not None
        return message

    def _end(self, wait_s: float = 0.0) -> int | None:
        """Reap the process, and kill it if it has not ended by itself; returns how it ended."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was never sent
                    stream.close()
        return process.returncode
