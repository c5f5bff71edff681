"""Task prompts: texts that precede the prompts of requests that name them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.sections.api import ApiSection
from remora.configs.sections.warmup import WarmupSection
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.generation.task_prompts import TaskPrompts
from remora.deployments.warm_up import warm_up
from remora.engine.client import LocalEngineClient
from remora.engine.engine import Engine
from remora.engine.types import Request, SamplingParams
from tests.deployments.fakes import CharTokenizer, FakeServer, make_client, make_config
from tests.engine.configured import plan_for
from tests.engine.fakes import VOCAB, FakeRunner, expected_output

TASKS = {"sum": "Sum up: ", "7": "Translate: "}
COMPLETION = {"prompt": "cats", "max_tokens": 2}


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


async def asked(path: str, body: dict[str, Any], **api: Any) -> Request:
    """Return the engine request of a body."""
    server = FakeServer(config=make_config(**({"task_prompts": TASKS} | api)))
    async with make_client(server) as client:
        assert (await client.post(path, json=body)).status_code == 200
    (request,) = server.client.requests
    return request


@pytest.mark.observes("api.task_prompts")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/generate", {"text": "cats", "sampling_params": {"max_new_tokens": 2}}),
    ],
)
async def test_the_text_of_a_task_stands_before_the_prompt(path: str, body: dict[str, Any]) -> None:
    named = await asked(path, {**body, "task_id": "sum"})
    numbered = await asked(path, {**body, "task_id": 7})
    plain = await asked(path, body)

    assert (list(named.prompt_ids), named.kept_tokens) == (ids("Sum up: cats"), 8)
    assert (list(numbered.prompt_ids), numbered.kept_tokens) == (ids("Translate: cats"), 11)
    assert (list(plain.prompt_ids), plain.kept_tokens) == (ids("cats"), 0)


async def test_the_text_of_a_task_stands_before_a_conversation() -> None:
    path = "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "cats"}], "max_tokens": 2}
    named = await asked(path, {**body, "task_id": "sum"})
    plain = await asked(path, body)

    assert list(named.prompt_ids) == [*ids("Sum up: "), *plain.prompt_ids]
    assert named.kept_tokens == 8
    assert plain.kept_tokens == 0


async def test_a_task_and_a_conversation_have_one_beginning_together() -> None:
    class Beginning(CharTokenizer):
        """Begins plain texts with a ^, as the template begins conversations."""

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return ids("^" * add_special_tokens + text)

        def render_chat(self, messages: Any, **options: Any) -> str:
            return "^" + super().render_chat(messages, **options)

    server = FakeServer(config=make_config(task_prompts=TASKS), tokenizer=Beginning())
    async with make_client(server) as client:
        body = {"messages": [{"role": "user", "content": "cats"}], "task_id": "sum"}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200

    (request,) = server.client.requests
    text = "".join(map(chr, request.prompt_ids))
    assert text.startswith("^Sum up: ")
    assert text.count("^") == 1


async def test_a_prompt_that_is_cut_leaves_room_for_the_task() -> None:
    body = {**COMPLETION, "prompt": "cats" * 300, "task_id": "sum"}

    request = await asked("/v1/completions", body, prompt_truncation="head")

    assert list(request.prompt_ids) == ids("Sum up: " + ("cats" * 300)[-990:])


@pytest.mark.parametrize(
    "fields",
    [{"task_id": "x"}, {"task_id": "sum", "echo": True}, {"task_id": "sum", "suffix": "x"}],
)
async def test_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    server = FakeServer(config=make_config(task_prompts=TASKS))
    async with make_client(server) as client:
        answer = await client.post("/v1/completions", json=COMPLETION | fields)

    assert answer.status_code == 400


@pytest.mark.observes("api.task_prompts_file")
@pytest.mark.parametrize(
    "written",
    [
        TASKS,
        [{"task_id": "sum", "prompt": TASKS["sum"]}, {"task_id": 7, "prompt": TASKS["7"]}],
    ],
)
async def test_texts_may_stand_in_a_file(written: Any, tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(written))

    for task_id, text in TASKS.items():
        request = await asked(
            "/v1/completions",
            {**COMPLETION, "task_id": task_id},
            task_prompts={},
            task_prompts_file=str(file),
        )
        assert list(request.prompt_ids) == ids(text + "cats")


@pytest.mark.parametrize("text", ["[1]", '{"a": ""}', "{"])
def test_a_file_that_holds_something_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(text)

    with pytest.raises(ConfigError, match=r"api\.task_prompts_file"):
        TaskPrompts.configured(ApiSection(task_prompts_file=str(file)), Letters())  # type: ignore[arg-type]


async def test_a_replica_computes_them_before_it_is_ready() -> None:
    server = FakeServer(config=make_config(task_prompts=TASKS))

    await warm_up(ServerState.over(server), WarmupSection(enabled=False))

    asked = server.client.requests
    assert [list(request.prompt_ids) for request in asked] == [ids(text) for text in TASKS.values()]


class Letters:
    """A tokenizer with small ids."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(char) % (VOCAB - 1) + 1 for char in text]


async def tokens_of(client: LocalEngineClient, prompt: Sequence[int], name: str) -> tuple[int, Any]:
    """Run a request; return the number of cached tokens, and its output."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    outputs = [
        output
        async for output in client.generate(
            Request(request_id=name, prompt_ids=prompt, sampling=sampling)
        )
    ]
    return outputs[-1].num_cached_tokens, [t for output in outputs for t in output.token_ids]


async def test_their_kv_stays_while_others_can_go() -> None:
    plan = plan_for(kv_tokens=64)
    engine = Engine(plan, FakeRunner(plan.page_size), eos_token_ids=[0], vocab_size=VOCAB)
    client = LocalEngineClient(engine, None)
    tasks = TaskPrompts.configured(
        ApiSection(task_prompts={"sum": "Sum up: ", "other": "a text to drop"}),
        Letters(),  # type: ignore[arg-type]
    )
    try:
        await tasks.compute(client, plan.max_sequence_tokens)
        for number in range(10, 20):  # more than fits, each used later than the tasks
            await tokens_of(client, [number] * 20, f"r{number}")
        prompt = [*tasks.ids("sum"), 3, 4]
        num_cached, tokens = await tokens_of(client, prompt, "last")
    finally:
        client.close()

    assert num_cached == 8
    assert tokens == expected_output(prompt, 2)
    assert engine.stats().evicted_pages_total > 0


async def test_a_task_that_leaves_no_room_is_refused() -> None:
    tasks = TaskPrompts({"long": [1] * 20})

    with pytest.raises(ConfigError, match="the text of long has 20 tokens, and a sequence 21 at"):
        await tasks.compute(None, 21)  # type: ignore[arg-type]
