"""The compiler process: what a source may do to the child that compiles it, and to no other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import EngineError
from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar import compiler_process
from remora.engine.grammar.compiler_process import CompilerProcess
from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.frames import frame, receive
from remora.engine.grammar.prepare import Source, SourceKind
from tests.engine.grammar.faulty import COMMAND, FAULTS, TOO_LONG
from tests.engine.grammar.walks import BYTES

BACKENDS = ("xgrammar", "outlines")
MakeProcess = Callable[..., CompilerProcess]
GREETING = {
    "backend": "outlines",
    "is_compact": False,
    "memory": 2**28,
    "timeout_s": 60,
    "wall_s": 60,
    "vocabulary": BYTES.to_json(),
    "warm_up": {"kind": "regex", "text": "a"},
}


@pytest.fixture
def make_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeProcess]:
    """Makes faulty compilers, which give up what sleeps after twice its time."""
    monkeypatch.setattr(compiler_process, "COMMAND", COMMAND)
    monkeypatch.setattr(compiler_process, "WALL_RATIO", 2)
    made: list[CompilerProcess] = []

    def make(backend: str = "outlines", **section: Any) -> CompilerProcess:
        section = {"compile_memory": "256MiB", "compile_timeout_s": 30, **section}
        made.append(CompilerProcess(GrammarSection(backend=backend, **section), BYTES))  # type: ignore[arg-type]
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def pattern(text: str) -> Source:
    return Source(SourceKind.REGEX, text)


def pid_of(process: CompilerProcess) -> int:
    assert process.pid is not None
    return process.pid


def children(pid: int) -> list[int]:
    """The living children of a process, and those that nobody has taken note of."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; the test's own time limit ends what never is."""
    while not condition():
        time.sleep(0.01)


def held(pid: int) -> list[str]:
    """What the open files of a process are, in their order, without numbers."""
    fds = sorted(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return [os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in fds]


def is_gone(pid: int) -> bool:
    """Whether no process of this id does anything any more."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def begin(threads: ThreadPoolExecutor, process: CompilerProcess, text: str) -> Future[bytes]:
    """Start a source that does not end; returns when a child has it."""
    num_before = len(children(pid_of(process)))
    future = threads.submit(process.compile, pattern(text))
    wait_for(lambda: len(children(pid_of(process))) > num_before)
    return future


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ends", [True, False])
def test_a_fault_costs_its_source_and_one_child(
    backend: str, ends: bool, make_process: MakeProcess
) -> None:
    process = make_process(backend) if ends else make_process(backend, compile_timeout_s=2.0)
    pid = pid_of(process)

    for fault, said in FAULTS.items():
        if (said != TOO_LONG) == ends:
            with pytest.raises(ConstraintError, match=said):
                process.compile(pattern(fault))
            assert process.compile(pattern("next"))

    assert process.pid == pid
    wait_for(lambda: children(pid) == [])


@pytest.mark.parametrize("fault", ["sleep", "spin"])
def test_others_are_compiled_while_one_hangs(
    fault: str, make_process: MakeProcess, threads: ThreadPoolExecutor
) -> None:
    process = make_process()
    hanging = begin(threads, process, fault)

    for number in range(5):
        assert process.compile(pattern(f"number {number}"))

    assert not hanging.done()
    process.close()
    with pytest.raises(EngineError, match="closed"):
        hanging.result()


def test_only_what_computes_uses_up_its_time(make_process: MakeProcess) -> None:
    process = make_process(compile_timeout_s=0.6)

    assert process.compile(pattern("late"))


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_process_killed_while_idle_is_replaced(
    is_reaped: bool, make_process: MakeProcess
) -> None:
    process = make_process()
    pid = pid_of(process)
    wait_for(lambda: children(pid) == [])

    os.kill(pid, signal.SIGKILL)
    if is_reaped:
        os.waitpid(pid, 0)

    assert process.compile(pattern("next"))
    assert process.pid != pid


def test_who_waits_for_a_process_that_is_killed_is_served_by_the_next(
    make_process: MakeProcess, threads: ThreadPoolExecutor
) -> None:
    process = make_process()
    pid = pid_of(process)
    late = [begin(threads, process, f"late {number}") for number in range(2)]
    orphans = children(pid)

    os.kill(pid, signal.SIGKILL)

    assert process.compile(pattern("next"))
    assert all(one.result() for one in late)
    assert process.pid != pid
    wait_for(lambda: all(is_gone(orphan) for orphan in orphans))


def test_a_process_that_stands_still_is_replaced(
    make_process: MakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_process, "GRACE_S", 0.2)
    process = make_process(compile_timeout_s=0.2)
    pid = pid_of(process)
    os.kill(pid, signal.SIGSTOP)

    with pytest.raises(ConstraintError, match="longer than"):
        process.compile(pattern("unlucky"))

    assert is_gone(pid)
    process.start()
    assert process.pid != pid


def test_a_process_that_ends_whenever_it_is_asked_is_an_error_of_ours(
    make_process: MakeProcess,
) -> None:
    process = make_process()

    with pytest.raises(EngineError, match="ended twice"):
        process.compile(pattern("parricide, then crash"))


def test_a_process_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "COMMAND", ("false",))

    with pytest.raises(EngineError, match="does not start"):
        CompilerProcess(GrammarSection(), BYTES).start()


def test_a_closed_process_is_not_started_again(make_process: MakeProcess) -> None:
    process = make_process()
    process.close()
    process.close()

    with pytest.raises(EngineError, match="closed"):
        process.compile(pattern("next"))


def test_nothing_is_left_of_many_compiles(make_process: MakeProcess) -> None:
    process = make_process()
    pid = pid_of(process)
    process.compile(pattern("first"))  # after its greeting, the server opens what it keeps
    wait_for(lambda: children(pid) == [])
    fds = [Path("/proc/self/fd"), Path(f"/proc/{pid}/fd")]
    before = [len(list(folder.iterdir())) for folder in fds]

    for number in range(200):
        process.compile(pattern(f"number {number}"))

    wait_for(lambda: children(pid) == [])
    # The server may still have held the connection of the first one when they were counted.
    wait_for(lambda: len(list(fds[1].iterdir())) <= before[1])
    assert len(list(fds[0].iterdir())) == before[0]
    assert process.pid == pid


def test_a_child_holds_its_own_connection_and_nothing_else(
    make_process: MakeProcess, threads: ThreadPoolExecutor
) -> None:
    process = make_process()
    waiting = [begin(threads, process, "sleep") for _ in range(3)]

    pids = children(pid_of(process))
    wait_for(lambda: all(held(pid) == ["/dev/null"] * 3 + ["socket"] for pid in pids))

    assert not any(one.done() for one in waiting)
    process.close()


def test_the_process_and_its_children_end_with_the_input() -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    with control:
        for message in (GREETING, {"kind": "regex", "text": "sleep"}):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(control, [b"x"], [theirs.fileno()])
                ours.sendall(frame(message))
                if message is GREETING:
                    assert receive(ours, 60)[0] == {"ready": True}
        wait_for(lambda: len(children(process.pid)) == 1)
        (child,) = children(process.pid)

    assert process.wait() == 0
    wait_for(lambda: is_gone(child))


def test_a_process_that_is_asked_nothing_ends_with_its_input() -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.close()
    with theirs:
        ended = subprocess.run(
            compiler_process.COMMAND, stdin=theirs.fileno(), timeout=60, check=False
        )

    assert ended.returncode == 0


@pytest.mark.parametrize("sent", [0, 5, None], ids=["nothing", "part", "greeting"])
def test_a_process_whose_client_ends_while_it_starts_ends_without_a_word(sent: int | None) -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, greeting = socket.socketpair()
    with theirs, greeting:
        socket.send_fds(control, [b"x"], [greeting.fileno()])
        ours.sendall(frame(GREETING)[:sent])
        control.close()
        ours.close()
        greeting.close()
        ended = subprocess.run(
            compiler_process.COMMAND,
            stdin=theirs.fileno(),
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )

    assert (ended.returncode, ended.stderr) == (0, b"")
