"""The compiler process: `python -P -m remora.engine.grammar.worker`.

A fork server: it imports a backend and reads the vocabulary once, then forks a child for each
source. A source that hangs, crashes or exhausts memory costs that child, and the others continue. A
child's limit is processor time, so that a busy machine refuses nothing that an idle one accepts.

The input is a socket that delivers connections: one for each exchange, with one message in each
direction. The server answers the first one, the greeting; children answer the others, or the server
if its child could not. When the input ends, everything ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import sys
import types
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.frames import frame, receive
from remora.engine.grammar.prepare import Source, SourceKind
from remora.engine.grammar.trial import Compiler, TryingCompiler
from remora.engine.grammar.vocabulary import Vocabulary

NICENESS = 10
# Wall-clock time; the client has given up long before if it is alive.
GREETING_TIMEOUT_S = 300.0
# Exit code of a child that has answered; native code that calls exit would end with 0.
ANSWERED = 101


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """Limits of one child.

    timeout_s:     processor time
    wall_s:        wall-clock time, for a child that sleeps
    memory_bytes:  in addition to the server's memory
    """

    timeout_s: float
    wall_s: float
    memory_bytes: int

    def set(self) -> None:
        """Apply the limits to this process; a signal ends it when its time is over."""
        signal.setitimer(signal.ITIMER_PROF, self.timeout_s)
        signal.setitimer(signal.ITIMER_REAL, self.wall_s)
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + self.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class ForkServer:
    """Forks a child for each connection, and makes sure that each is answered."""

    def __init__(self, control: socket.socket, compiler: Compiler, limits: ChildLimits) -> None:
        self._control = control
        self._compiler = compiler
        self._limits = limits
        self._pids: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the input ends; running children are killed then."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    key.data()
                elif (connection := receive_connection(self._control)) is not None:
                    self._begin(connection)
                else:
                    for pid in self._pids:
                        os.kill(pid, signal.SIGKILL)
                    return

    def _begin(self, connection: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            serve_one(connection, self._compiler, self._limits)
        self._pids.add(pid)
        pidfd = os.pidfd_open(pid)
        bury = partial(self._bury, pid, pidfd, connection)
        self._selector.register(pidfd, selectors.EVENT_READ, bury)

    def _bury(self, pid: int, pidfd: int, connection: socket.socket) -> None:
        """Record the end of a child, and answer if it did not."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._pids.remove(pid)
        ending = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with connection:
            if ending != ANSWERED:
                connection.settimeout(0)
                with contextlib.suppress(OSError):  # the client has disconnected
                    connection.sendall(frame(self._reason(ending)))

    def _reason(self, ending: int) -> dict[str, Any]:
        # The wall clock or another process ended it: the same source may succeed later.
        is_passing = ending in (-signal.SIGALRM, -signal.SIGKILL)
        if ending in (-signal.SIGPROF, -signal.SIGALRM):
            limit = f"{self._limits.timeout_s:g} s (grammar.compile_timeout_s)"
            message = f"compiling it takes longer than {limit}"
            return {"error": message, "limit": "compile_timeout_s", "is_passing": is_passing}
        message = (
            "compiling it takes more memory than grammar.compile_memory, or crashes the compiler"
        )
        return {"error": message, "limit": "compile_memory", "is_passing": is_passing}


def main() -> None:
    """Answer the greeting, then serve until the input ends, or end at once if the client has."""
    os.nice(NICENESS)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)
    connection = receive_connection(control)
    if connection is None:
        return
    with connection:
        try:
            head, _ = receive(connection, GREETING_TIMEOUT_S)
        except (OSError, EOFError):
            return
        compiler = _compiler(head)
        _answer(compiler, head["warm_up"])
        gc.collect()
        gc.freeze()  # so that children share its pages
        try:
            connection.sendall(frame({"ready": True}))
        except OSError:
            return
    limits = ChildLimits(
        timeout_s=head["timeout_s"], wall_s=head["wall_s"], memory_bytes=head["memory"]
    )
    ForkServer(control, compiler, limits).run()


def receive_connection(control: socket.socket) -> socket.socket | None:
    """Return the next connection; None at the end of the input."""
    _, fds, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=fds[0]) if fds else None


def serve_one(connection: socket.socket, compiler: Compiler, limits: ChildLimits) -> NoReturn:
    """Answer one connection and end, in a child."""
    status = 1
    try:
        limits.set()
        os.dup2(1, 2)  # native code's output does not belong in the log
        # Other connections and the input must end when the server does.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        request, _ = receive(connection, limits.wall_s)
        reply, body = _answer(compiler, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(frame(reply, body))
        status = ANSWERED
    finally:
        os._exit(status)


def _answer(compiler: Compiler, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    try:
        source = Source(SourceKind(request["kind"]), request["text"])
        return {"ok": True}, compiler.compile(source)
    except ConstraintError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        message = "compiling it takes more memory than grammar.compile_memory allows"
        return {"error": message, "limit": "compile_memory"}, b""


def _compiler(head: dict[str, Any]) -> Compiler:
    vocabulary = Vocabulary.from_json(head["vocabulary"])
    is_compact = head["is_compact"]
    if head["backend"] == "outlines":
        from remora.engine.grammar.outlines_backend import OutlinesCompiler, OutlinesLoader

        outlines = OutlinesCompiler(vocabulary, is_compact=is_compact)
        return TryingCompiler(outlines, OutlinesLoader(vocabulary), vocabulary.size)
    _put_torch_aside()
    from remora.engine.grammar.xgrammar_backend import XgrammarCompiler, XgrammarLoader

    xgrammar = XgrammarCompiler(vocabulary, is_compact=is_compact)
    return TryingCompiler(xgrammar, XgrammarLoader(vocabulary), vocabulary.size)


def _put_torch_aside() -> None:
    """Replace two libraries that xgrammar imports for its annotations only.

    Importing them takes seconds, most of the memory, and most of the time of a fork.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # what xgrammar stands on tries it only
    importlib.import_module("tvm_ffi")
    for name in ("torch", "transformers"):
        sys.modules[name] = _StandIn(name)


class _StandIn(types.ModuleType):
    """A module that has a class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None})


if __name__ == "__main__":
    main()
