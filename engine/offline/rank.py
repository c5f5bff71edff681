"""A rank other than 0 of an LLM: a process that loads its share and follows.

Started by `ranks.py` with one end of a pair of sockets as its standard input. It reads what to
load, answers None once it can step or the text of its error, and ends with rank 0 or its process.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection


def main() -> None:
    """Run the rank."""
    connection = Connection(os.dup(sys.stdin.fileno()))
    plan, rank, meeting = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    from remora.engine.launch import build_follower

    try:
        follower = build_follower(plan, rank, meeting)
    except BaseException as error:  # a boundary: rank 0 raises it
        connection.send(str(error) or type(error).__name__)
        raise SystemExit(1) from None
    connection.send(None)
    with suppress(Exception):  # rank 0 has the error
        follower.run()
    os._exit(0)


def _end_with(connection: Connection) -> None:
    """End this process with rank 0's."""
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)


if __name__ == "__main__":
    main()
