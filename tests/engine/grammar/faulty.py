"""A compiler that does on demand what a bug in native code would."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_CODE = """
import os, signal, time
import remora.engine.grammar.worker as worker
answer = worker._answer
def faulty(compiler, request):
    text = request["text"]
    if "parricide" in text: os.kill(os.getppid(), signal.SIGKILL)
    if "sleep" in text: time.sleep(600)
    if "late" in text: time.sleep(1)
    if "spin" in text:
        while True: pass
    if "felled" in text and not os.path.exists(os.environ["KILLED_ONCE"]):
        open(os.environ["KILLED_ONCE"], "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if "crash" in text: os.kill(os.getpid(), signal.SIGSEGV)
    if "eat" in text: bytearray(2 << 30)
    if "abort" in text: os.abort()
    if "raise" in text: raise KeyError(text)
    if "leave" in text: os._exit(0)
    return answer(compiler, request)
worker._answer = faulty
worker.main()
"""
COMMAND: Sequence[str] = (sys.executable, "-P", "-c", _CODE)
TOO_LONG = "longer than"
# What patterns must hold for it, and what is said of them.
FAULTS = {
    "sleep": TOO_LONG,
    "spin": TOO_LONG,
    "crash": "crashes the compiler",
    "abort": "crashes the compiler",
    "raise": "crashes the compiler",
    "leave": "crashes the compiler",
    "eat": "more memory than",
}
