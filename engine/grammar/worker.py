"""The compiler process: `python -P -m remora.engine.grammar.worker`.

Reads a vocabulary and then sources from its input, and writes what they compile to. It may be
killed at any time and takes nothing along: a source that hangs, crashes or eats memory costs this
process only. Its time is processor time, so that a busy machine refuses nothing that an idle one
takes; a signal ends the process when the time is over. It ends with its input, too.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import types
from typing import Any, BinaryIO, Protocol

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.frames import frame, read_frame
from remora.engine.grammar.prepare import Source, SourceKind
from remora.engine.grammar.vocabulary import Vocabulary

NICENESS = 10
# On the wall; the parent has killed us long before if it lives.
ORPHAN_TIMEOUT_S = 300.0


class Compiler(Protocol):
    """What a backend has in this process."""

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError."""
        ...


def main() -> None:
    """Serve until the input ends."""
    os.nice(NICENESS)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what native code prints is no reply
    start = read_frame(requests)
    if start is None:
        return
    head, _ = start
    compiler = _compiler(head)
    _limit_memory(head["memory"])
    _send(replies, {"ready": True})
    while (message := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, head["timeout_s"])
        signal.setitimer(signal.ITIMER_REAL, ORPHAN_TIMEOUT_S)
        reply, body = _answer(compiler, message[0])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply, body)


def _answer(compiler: Compiler, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    try:
        source = Source(SourceKind(request["kind"]), request["text"])
        return {"ok": True}, compiler.compile(source)
    except ConstraintError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {"error": "compiling it takes more memory than grammar.compile_memory allows"}, b""


def _compiler(head: dict[str, Any]) -> Compiler:
    vocabulary = Vocabulary.from_json(head["vocabulary"])
    if head["backend"] == "outlines":
        from remora.engine.grammar.outlines_backend import OutlinesCompiler

        return OutlinesCompiler(vocabulary, is_compact=head["is_compact"])
    _put_transformers_aside()
    from remora.engine.grammar.xgrammar_backend import XgrammarCompiler

    return XgrammarCompiler(vocabulary, is_compact=head["is_compact"])


def _put_transformers_aside() -> None:
    """xgrammar imports transformers for annotations only; that takes most of a second."""
    stand_in = types.ModuleType("transformers")
    for name in (
        "LogitsProcessor",
        "PretrainedConfig",
        "PreTrainedTokenizer",
        "PreTrainedTokenizerBase",
        "PreTrainedTokenizerFast",
    ):
        setattr(stand_in, name, type(name, (), {}))
    sys.modules.setdefault("transformers", stand_in)


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(replies: BinaryIO, head: dict[str, Any], body: bytes = b"") -> None:
    replies.write(frame(head, body))
    replies.flush()


if __name__ == "__main__":
    main()
