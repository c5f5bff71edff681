"""A stream continues at another replica with each byte sent once, or ends with an error."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from remora.deployments.adapters.served_adapters import FixedAdapters
from tests.deployments.fakes import FakeServer
from tests.deployments.gateway.fakes import Replica, Replicas, ResumingEngine, gateway, ready

TEXT = "The quick brown fox."
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
GREEDY: dict[str, Any] = {"stream": True, "temperature": 0}
NAMED = {"x-request-id": "same"}


class Versions(FixedAdapters):
    """One adapter with a given lora_id."""

    def __init__(self, version: int) -> None:
        self._lora_ids = {"a": version}


def make_replica(name: str, *, stop_at: int | None = None, text: str = TEXT) -> Replica:
    engine = ResumingEngine(text=text)
    engine.stop_at = stop_at
    return Replica(name, FakeServer(client=engine))


async def stream(path: str, body: Any, *replicas: Replica, resumes: bool = True) -> str:
    """Return a whole stream; replicas that hang are killed."""
    model: Replicas = ready(*replicas)
    async with gateway(model, resumes=resumes, max_crashes=9) as client:
        asking = asyncio.create_task(client.post(path, json=body, headers=NAMED))
        for replica in replicas[:-1]:
            while not replica.server.client.running:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)  # its output until it hangs is on the way
            replica.kill()
        return (await asking).text


@pytest.fixture(autouse=True)
def _clock_of_the_answers_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    # A resumed response keeps its creation time.
    seconds = iter(range(10**9, 10**9 + 10**6))
    monkeypatch.setattr(
        "remora.deployments.http.generation.request_context.time.time", lambda: next(seconds)
    )


@pytest.mark.parametrize("stop_at", [1, 2, 7, len(TEXT) - 1])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HI | GREEDY),
        ("/v1/chat/completions", HI | GREEDY | {"stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "x", **GREEDY}),
        ("/v1/completions", {"prompt": "x", "stream": True, "seed": 7}),
        ("/v1/messages", HI | GREEDY | {"max_tokens": 99}),
        ("/generate", {"text": "x", "stream": True, "sampling_params": {"temperature": 0}}),
    ],
)
async def test_a_stream_goes_on_where_it_was(path: str, body: Any, stop_at: int) -> None:
    undisturbed = await stream(path, body, make_replica("one"))
    doomed = make_replica("one", stop_at=stop_at)

    resumed = await stream(path, body, doomed, make_replica("two"))

    assert _without_times(resumed) == _without_times(undisturbed)
    assert len(set(_created(resumed))) <= 1


def _created(text: str) -> list[str]:
    return [part.partition(",")[0] for part in text.split('"created":')[1:]]


def _without_times(text: str) -> str:
    return re.sub(r'("created"|"e2e_latency"):[^,}]+', r"\1:0", text)


async def test_a_stream_survives_several_deaths() -> None:
    replicas = [make_replica(str(stop), stop_at=stop) for stop in (2, 5, 9)]

    text = await stream(
        "/v1/completions",
        {"prompt": "x", "max_tokens": 99, **GREEDY},
        *replicas,
        make_replica("last"),
    )

    assert "".join(part.partition('"')[0] for part in text.split('"text":"')[1:]) == TEXT
    assert "error" not in text


@pytest.mark.parametrize(
    ("path", "body", "resumes"),
    [
        ("/v1/completions", {"prompt": "x", "stream": True}, True),
        ("/v1/completions", {"prompt": "x", **GREEDY, "n": 2}, True),
        ("/v1/completions", {"prompt": "x", **GREEDY, "logprobs": 1}, True),
        ("/v1/completions", {"prompt": "x", **GREEDY}, False),
    ],
)
async def test_what_cannot_be_continued_exactly_ends_with_an_error_event(
    path: str, body: Any, resumes: bool
) -> None:
    doomed = make_replica("one", stop_at=4)

    text = await stream(path, body, doomed, make_replica("two"), resumes=resumes)

    assert "has died" in text
    assert "overloaded_error" in text


@pytest.mark.parametrize("versions", [(5, 5), (5, 6)])
async def test_no_version_of_an_adapter_goes_on_from_anothers_tokens(
    versions: tuple[int, int],
) -> None:
    """The second replica's own text differs, which shows the replica that generated it."""
    doomed, other = make_replica("one", stop_at=4), make_replica("two", text="The end.")
    for replica, version in zip((doomed, other), versions, strict=True):
        replica.server.adapters = Versions(version)
    body = {"model": "tiny:a", "prompt": "x", **GREEDY}

    text = await stream("/v1/completions", body, doomed, other)

    given = other.server.client.requests[-1].resumption
    assert given is not None
    assert bool(given.given) == (versions[0] == versions[1])
    assert "error" not in text


async def test_an_answer_that_comes_out_differently_is_not_continued() -> None:
    doomed = make_replica("one", stop_at=4)

    text = await stream(
        "/v1/completions", {"prompt": "x", **GREEDY}, doomed, make_replica("two", text="Thx, other")
    )

    assert "no other can continue its answer" in text
