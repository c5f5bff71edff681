"""Keys of the section `api`: their effects on requests and responses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
    make_plan,
)
from tests.deployments.http.streams import ask, events, prompt_of

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TURN = [{"role": "user", "content": "abcdefghijkl"}]
PROMPT = "abcdefghijkl"


def make_server(text: str = "Paris.", *, tokenizer: Any = None, **api: Any) -> FakeServer:
    return FakeServer(
        FakeEngine(text=text), tokenizer=tokenizer or CharTokenizer(), config=make_config(**api)
    )


async def post(server: FakeServer, path: str, **body: Any) -> httpx.Response:
    return await ask(path, server, **body)


# -- prompts that are too long -----------------------------------------------------------------


@pytest.mark.observes("api.prompt_truncation")
@pytest.mark.parametrize(
    ("drops", "kept"), [("head", "ghijkl"), ("center", "abcjkl"), ("tail", "abcdef")]
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4}),
        (COMPLETIONS, {"prompt": [97 + i for i in range(12)], "max_tokens": 4}),
        (GENERATE, {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}}),
        (GENERATE, {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}),
    ],
)
async def test_a_prompt_is_cut_to_leave_room_for_the_output(
    path: str, body: dict[str, Any], drops: str, kept: str
) -> None:
    async def ask(truncation: str) -> tuple[int, str]:
        server = make_server(prompt_truncation=truncation)
        server.plan = make_plan(max_model_len=10)
        status = (await post(server, path, **body)).status_code
        return status, "".join(chr(i) for r in server.client.requests for i in r.prompt_ids)

    assert (await ask("none"))[0] in (400, 422)
    assert await ask(drops) == (200, kept)


async def test_prompts_are_cut_only_if_needed_and_first_as_the_request_says() -> None:
    server = make_server(prompt_truncation="head")
    long = [{"role": "user", "content": "a" * 100_000}]
    fields = {"truncate_prompt_tokens": 3, "truncation_side": "right", "echo": True}

    await post(server, COMPLETIONS, prompt=PROMPT, max_tokens=4)
    assert (await post(server, CHAT, messages=long, max_tokens=10)).status_code == 200
    own = await post(server, COMPLETIONS, prompt=PROMPT, max_tokens=1, **fields)

    assert (prompt_of(server, 0), prompt_of(server, 2)) == (PROMPT, "abc")
    assert len(prompt_of(server, 1)) == 990
    assert prompt_of(server, 1).endswith("aaa<|assistant|>")
    assert own.json()["choices"][0]["text"] == "abcP"


# -- streams -----------------------------------------------------------------------------------


@pytest.mark.observes("api.stream_interval_tokens")
async def test_a_stream_speaks_every_so_many_tokens() -> None:
    async def texts(**api: Any) -> list[str]:
        fields = {"prompt": "a", "max_tokens": 10, "logprobs": 1, "stream": True}
        answer = await post(make_server("abcdefghij", **api), COMPLETIONS, **fields)
        choices = [event["choices"][0] for event in events(answer)]
        assert [t for c in choices for t in c["logprobs"]["tokens"]] == list("abcdefghij")
        return [choice["text"] for choice in choices]

    assert await texts() == list("abcdefghij")
    assert await texts(stream_interval_tokens=4) == ["a", "bcde", "fghi", "j"]


async def test_a_client_that_leaves_a_stream_of_intervals_ends_its_request() -> None:
    server = make_server("a" * 50, stream_interval_tokens=8)
    server.client.gate = asyncio.Event()
    async with make_client(server) as client:
        body = {"prompt": "a", "max_tokens": 50, "stream": True}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post(COMPLETIONS, json=body), 0.2)
        await asyncio.wait_for(server.client.gone.wait(), 5)

    assert len(server.client.closed) == 1


@pytest.mark.observes("api.prompt_logprobs")
async def test_answers_hold_the_prompts_log_probabilities_unasked() -> None:
    async def ask(path: str, wanted: bool, **body: Any) -> Any:
        server = make_server(prompt_logprobs=wanted, generate_dialect="lightllm")
        answer = (await post(server, path, **body)).json()
        return answer.get("prompt_logprobs") or answer.get("choices", [{}])[0].get(
            "prompt_logprobs"
        )

    bodies: list[tuple[str, dict[str, Any], int]] = [
        (COMPLETIONS, {"prompt": "abc"}, 3),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, 22),
        (GENERATE, {"inputs": "abc"}, 3),
    ]
    for path, body, num_tokens in bodies:
        assert await ask(path, False, **body) is None
        lines = await ask(path, True, **body)
        assert (len(lines), lines[0]) == (num_tokens, None)
    assert lines[1:] == [{"98": -2.0}, {"99": -2.0}]


# -- available APIs -------------------------------------------------------------------------------


@pytest.mark.observes("api.generation")
@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, {"messages": TURN}, "chat"),
        ("/v1/responses", {"input": "a"}, "chat"),
        ("/v1/messages", {"messages": TURN, "max_tokens": 1}, "chat"),
        ("/api/chat", {"model": "tiny", "messages": TURN, "stream": False}, "chat"),
        (COMPLETIONS, {"prompt": "a"}, "completion"),
        (GENERATE, {"text": "a"}, "completion"),
        (GENERATE, {"inputs": "a"}, "completion"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "stream": False}, "completion"),
    ],
)
async def test_one_way_to_ask_may_be_closed(path: str, body: dict[str, Any], kind: str) -> None:
    other = {"chat": "completion", "completion": "chat"}[kind]
    for generation, status in (("all", 200), (kind, 200), (other, 400)):
        response = await post(make_server(generation=generation), path, **body)
        is_tgi = "inputs" in body  # which returns 422
        assert response.status_code == (422 if is_tgi and status == 400 else status)
    assert "api.generation" in response.text


# -- tokenising --------------------------------------------------------------------------------


class SlowTokenizer(CharTokenizer):
    """Records the size of each batch and the number of concurrent calls."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.most = 0
        self._pause_s = pause_s
        self._num_running = 0
        self._lock = threading.Lock()

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        with self._lock:
            self.batches.append(len(texts))
            self._num_running += 1
            self.most = max(self.most, self._num_running)
        time.sleep(self._pause_s)
        with self._lock:
            self._num_running -= 1
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


async def ask_many(server: FakeServer, prompts: Sequence[str]) -> None:
    """Send all prompts at once and check that each reaches the engine unchanged."""
    server.plan = make_plan(max_model_len=10**6, num_pages=10**5, max_running_requests=64)
    async with make_client(server) as client:
        await asyncio.gather(
            *(client.post(COMPLETIONS, json={"prompt": p, "max_tokens": 1}) for p in prompts)
        )
    asked = ["".join(map(chr, request.prompt_ids)) for request in server.client.requests]
    assert sorted(asked) == sorted(prompts)


@pytest.mark.observes("api.tokenizer_threads")
@pytest.mark.parametrize("num_threads", [1, 3])
async def test_long_prompts_are_tokenised_by_so_many_threads(num_threads: int) -> None:
    tokenizer = SlowTokenizer(0.05)
    server = make_server(tokenizer=tokenizer, tokenizer_threads=num_threads)
    await ask_many(server, [str(number) * 20_000 for number in range(6)])

    assert tokenizer.most == num_threads


@pytest.mark.observes("api.tokenizer_batch_size")
async def test_prompts_that_come_together_are_tokenised_in_one_call() -> None:
    tokenizer = SlowTokenizer()
    server = make_server(tokenizer=tokenizer, tokenizer_batch_size=4, tokenizer_batch_wait_s=0.2)
    await ask_many(server, [f"prompt {number}" for number in range(10)])

    assert max(tokenizer.batches) == 4
    assert sum(tokenizer.batches) == 10

    await post(server, COMPLETIONS, prompt=["ab", "cd", "ef"], max_tokens=1)
    assert tokenizer.batches[-1] == 3  # prompts of a single request are batched, too


@pytest.mark.observes("api.tokenizer_batch_wait_s")
@pytest.mark.parametrize(("wait_s", "answered"), [(1.0, False), (0.0, True)])
async def test_a_lone_prompt_waits_as_long_as_the_operator_says(
    wait_s: float, answered: bool
) -> None:
    server = make_server(tokenizer_batch_size=4, tokenizer_batch_wait_s=wait_s)
    asking = asyncio.create_task(post(server, COMPLETIONS, prompt="a", max_tokens=1))

    done, _ = await asyncio.wait([asking], timeout=10.0 if answered else 0.2)
    asking.cancel()

    assert bool(done) is answered
