"""The oracle and the client: each wrong answer gets its verdict. No server of ours is started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.endurance.client import Choice, End, Seen, perform
from tests.endurance.oracle import Answer, Oracle, Outage, Reach, Verdict
from tests.endurance.traffic import CHAT, COMPLETIONS, Ask

FOX = "The quick brown fox jumps over the lazy dog and sleeps."
JUGS = "Pack my box with five dozen liquor jugs, please, today."
RETRY = {"message": "try again", "type": "overloaded_error"}
ASKS = {
    "fox": Ask("fox", COMPLETIONS, {"stream": True}),
    "two": Ask("two", COMPLETIONS, {"stream": True, "n": 2}),
    "whole": Ask("whole", COMPLETIONS, {}),
    "chat": Ask("chat", CHAT, {"stream": True}),
    "bad": Ask("bad", COMPLETIONS, {}, status=400),
}
ANSWERS = {
    "fox": Answer(((FOX, "[]", "length"),)),
    "two": Answer(((FOX, "[]", "length"), (JUGS, "[]", "length"))),
    "whole": Answer(((JUGS, "[]", "length"),)),
    "chat": Answer(((FOX, "[(0, ['f', '{}'])]", "tool_calls"),)),
}


def seen(name: str = "fox", *texts: str, **facts: Any) -> Seen:
    """Return what a client saw from 10 to 11 s."""
    choices = {index: Choice(text, finish_reason="length") for index, text in enumerate(texts)}
    given = {"status": 200, "end": End.COMPLETE, "choices": choices, **facts}
    return Seen(name, "r-1", 10.0, 11.0, **given)


def outage(reach: Reach, **facts: Any) -> Outage:
    return Outage(what="kill", reach=reach, **{"began_at": 10.5, "ended_at": 12.0, **facts})


CLOSED = {"end": End.CLOSED}
EVENT = {"error": RETRY}
REFUSED = {"status": 503, "error": RETRY, "may_retry": True}
SILENT, BUG = {**REFUSED, "may_retry": None}, {**REFUSED, "status": 500}
VICTIM = outage(Reach.VICTIM, pids=frozenset({7}))
RESUMED = outage(Reach.VICTIM, pids=frozenset({7}), is_resumed=True)

CASES: list[tuple[str, Seen, Sequence[Outage], Verdict]] = [
    ("whole", seen("fox", FOX), (), Verdict.WHOLE),
    ("whole during a fault", seen("fox", FOX), (VICTIM,), Verdict.WHOLE),
    ("short", seen("fox", FOX[:20]), (VICTIM,), Verdict.SHORT),
    ("empty 200", seen("fox", ""), (VICTIM,), Verdict.SHORT),
    ("no choices", seen("fox"), (VICTIM,), Verdict.DIFFERENT),
    ("a choice too few", seen("two", FOX), (), Verdict.DIFFERENT),
    ("a choice too many", seen("fox", FOX, FOX), (), Verdict.DIFFERENT),
    ("choices swapped", seen("two", JUGS, FOX), (), Verdict.MIXED),
    ("doubled at the start", seen("fox", FOX[:9] + FOX), (VICTIM,), Verdict.DOUBLED),
    ("doubled inside", seen("fox", FOX[:30] + FOX[12:]), (VICTIM,), Verdict.DOUBLED),
    ("doubled at the end", seen("fox", FOX + FOX[-12:]), (VICTIM,), Verdict.DOUBLED),
    ("doubled and closed", seen("fox", FOX[:30] + FOX[9:40], **CLOSED), (VICTIM,), Verdict.DOUBLED),
    ("a gap", seen("fox", FOX[:10] + FOX[15:]), (VICTIM,), Verdict.SHORT),
    ("other text", seen("fox", FOX[:10] + "x" * 40), (), Verdict.DIFFERENT),
    ("mixed", seen("fox", FOX[:10] + JUGS[10:]), (VICTIM,), Verdict.MIXED),
    ("mixed, then an error", seen("fox", FOX[:10] + JUGS[10:], **EVENT), (VICTIM,), Verdict.MIXED),
    ("other finish reason", seen("chat", FOX), (), Verdict.DIFFERENT),
    ("no [DONE]", seen("fox", FOX, end=End.UNFINISHED), (VICTIM,), Verdict.TRUNCATED),
    ("hang", seen("fox", end=End.TIMEOUT), (VICTIM,), Verdict.HANG),
    ("not JSON", seen("fox", end=End.UNREADABLE), (VICTIM,), Verdict.MALFORMED),
    ("event after [DONE]", seen("fox", FOX, problems=["x"]), (VICTIM,), Verdict.MALFORMED),
    ("closed for nothing", seen("fox", FOX[:9], **CLOSED), (), Verdict.UNEXPLAINED),
    (
        "closed, harmless fault",
        seen("fox", **CLOSED),
        (outage(Reach.NOTHING),),
        Verdict.UNEXPLAINED,
    ),
    (
        "closed before the fault",
        seen("fox", **CLOSED),
        (outage(Reach.ALL, began_at=11.1),),
        Verdict.UNEXPLAINED,
    ),
    (
        "closed after the recovery",
        seen("fox", **CLOSED),
        (outage(Reach.ALL, began_at=8, ended_at=9),),
        Verdict.UNEXPLAINED,
    ),
    ("closed on the victim", seen("fox", FOX[:9], **CLOSED), (VICTIM,), Verdict.CLOSED),
    (
        "closed by a cut",
        seen("fox", **CLOSED),
        (outage(Reach.CUT, rids=frozenset({"r-1"})),),
        Verdict.CLOSED,
    ),
    (
        "closed by a cut of another",
        seen("fox", **CLOSED),
        (outage(Reach.CUT, rids=frozenset({"r-2"})),),
        Verdict.UNEXPLAINED,
    ),
    (
        "sent into a cut",
        seen("fox", **CLOSED),
        (outage(Reach.CUT, began_at=10.01),),
        Verdict.CLOSED,
    ),
    (
        "closed in the middle by a cut of another",
        seen("fox", FOX[:9], first_at=10.5, **CLOSED),
        (outage(Reach.CUT, began_at=10.01),),
        Verdict.UNEXPLAINED,
    ),
    ("error event", seen("fox", FOX[:9], **EVENT), (VICTIM,), Verdict.ERROR),
    ("error event for nothing", seen("fox", **EVENT), (), Verdict.UNEXPLAINED),
    ("error without words", seen("fox", error={}, status=503), (VICTIM,), Verdict.MALFORMED),
    ("refused", seen("fox", **REFUSED), (VICTIM,), Verdict.ERROR),
    ("refused for nothing", seen("fox", **REFUSED), (), Verdict.UNEXPLAINED),
    (
        "may not retry",
        seen("fox", **SILENT),
        (VICTIM,),
        Verdict.NOT_RETRIABLE,
    ),
    ("status 500", seen("fox", **BUG), (VICTIM,), Verdict.NOT_RETRIABLE),
    ("bad request answered", seen("bad", JUGS), (), Verdict.DIFFERENT),
    ("bad request refused", seen("bad", status=400, error=RETRY), (), Verdict.WHOLE),
    ("good request refused", seen("fox", status=400, error=RETRY), (), Verdict.NOT_RETRIABLE),
    ("resumable, closed", seen("fox", FOX[:9], **CLOSED), (RESUMED,), Verdict.NOT_RESUMED),
    ("resumable, refused", seen("whole", **REFUSED), (RESUMED,), Verdict.NOT_RESUMED),
    ("not resumable", seen("two", FOX[:9], "", **EVENT), (RESUMED,), Verdict.ERROR),
    ("left", seen("fox", FOX[:9], end=End.LEFT), (), Verdict.LEFT),
    ("wrong text, then left", seen("fox", "Pack", end=End.LEFT), (), Verdict.DIFFERENT),
]


@pytest.mark.parametrize(
    ("what", "seen", "outages", "verdict"), CASES, ids=[case[0] for case in CASES]
)
def test_verdicts(what: str, seen: Seen, outages: Sequence[Outage], verdict: Verdict) -> None:
    assert Oracle(ASKS, ANSWERS, outages).judge(seen).verdict is verdict


def test_a_request_of_a_survivor_may_not_close() -> None:
    of_survivor = Oracle(ASKS, ANSWERS, [VICTIM], {"r-1": 8})
    of_victim = Oracle(ASKS, ANSWERS, [VICTIM], {"r-1": 7})

    for facts in (CLOSED, EVENT):
        assert of_survivor.judge(seen("fox", **facts)).verdict is Verdict.UNEXPLAINED
        assert of_victim.judge(seen("fox", **facts)).is_right


def event(text: str, finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = json.dumps({"choices": [{"index": 0, "text": JUGS, "finish_reason": "length"}]}).encode()
DONE, LAST = chunk(b"data: [DONE]\n\n"), chunk(b"")


def body(data: bytes, *, length: int | None = None, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: "
    return (
        head.encode() + str(len(data) if length is None else length).encode() + b"\r\n\r\n" + data
    )


# What a server sends, byte for byte, and the verdict if a fault of all requests was at that time.
WIRE: list[tuple[str, str, bytes, Verdict]] = [
    ("stream", "fox", STREAM + chunk(event(FOX, "length")) + DONE + LAST, Verdict.WHOLE),
    ("stream cut in a chunk", "fox", STREAM + chunk(event(FOX))[:30], Verdict.CLOSED),
    ("no last chunk", "fox", STREAM + chunk(event(FOX, "length")), Verdict.CLOSED),
    ("no [DONE]", "fox", STREAM + chunk(event(FOX, "length")) + LAST, Verdict.TRUNCATED),
    ("[DONE] too early", "fox", STREAM + chunk(event(FOX[:9])) + DONE + LAST, Verdict.SHORT),
    (
        "text after [DONE]",
        "fox",
        STREAM + chunk(event(FOX, "length")) + DONE + chunk(event("x")) + LAST,
        Verdict.MALFORMED,
    ),
    (
        "text after the finish",
        "fox",
        STREAM + chunk(event(FOX, "length")) + chunk(event("x")) + DONE + LAST,
        Verdict.MALFORMED,
    ),
    (
        "error event",
        "fox",
        STREAM + chunk(b"data: " + json.dumps({"error": RETRY}).encode() + b"\n\n") + DONE + LAST,
        Verdict.ERROR,
    ),
    ("event is not JSON", "fox", STREAM + chunk(b"data: {\n\n") + DONE + LAST, Verdict.MALFORMED),
    ("whole", "whole", body(WHOLE), Verdict.WHOLE),
    ("shorter than its length", "whole", body(WHOLE[:40], length=len(WHOLE)), Verdict.CLOSED),
    ("200 with half a body", "whole", body(WHOLE[:40]), Verdict.MALFORMED),
    ("200 with no body", "whole", body(b""), Verdict.MALFORMED),
    ("200 with an error", "whole", body(json.dumps({"error": RETRY}).encode()), Verdict.ERROR),
    ("plain 502", "whole", body(b"Bad Gateway", status="502 Bad Gateway"), Verdict.MALFORMED),
    ("no answer", "whole", b"", Verdict.CLOSED),
]


@pytest.mark.parametrize(("what", "name", "sent", "verdict"), WIRE, ids=[w[0] for w in WIRE])
async def test_what_is_on_the_wire(what: str, name: str, sent: bytes, verdict: Verdict) -> None:
    found = await ask_fake(ASKS[name], sent)
    fault = Outage(what="kill", reach=Reach.ALL, began_at=0.0)

    assert Oracle(ASKS, ANSWERS, [fault]).judge(found).verdict is verdict


async def test_a_server_that_sends_nothing_more_hangs() -> None:
    found = await ask_fake(ASKS["fox"], STREAM + chunk(event(FOX)), stays=True, timeout_s=0.2)

    assert Oracle(ASKS, ANSWERS).judge(found).verdict is Verdict.HANG


async def ask_fake(ask: Ask, sent: bytes, *, stays: bool = False, timeout_s: float = 10.0) -> Seen:
    """Return what the client sees of a server that sends these bytes, and closes or does not."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        if stays:
            await over.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            found = await perform(client, ask, "r-1", timeout_s=timeout_s)
        over.set()
    return found
