"""Ollama's API: its conformance table, and what limits a request's context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_config,
    make_plan,
)
from tests.deployments.http.conformance import ABSENT, Row, check_row
from tests.deployments.http.streams import ask, prompt_of

SOURCE = "ollama, docs/api.md"
CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hi"}]
TIMES = {
    "total_duration": int,
    "load_duration": int,
    "prompt_eval_count": int,
    "prompt_eval_duration": int,
    "eval_count": 2,
    "eval_duration": int,
}
END = {"model": "tiny", "created_at": str, "done": True, "done_reason": "stop", **TIMES}
SAID = {"message": {"role": "assistant", "content": "ab"}, "context": ABSENT}
WROTE = {"response": "ab", "context": list, "message": ABSENT}
PART = {"model": "tiny", "created_at": str, "done": False, "context": ABSENT}
ERROR = {"error": str}
DETAILS = {
    "format": str,
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "134.52M",
    "quantization_level": str,
    "parent_model": "",
}
CARD = {"name": "tiny", "model": "tiny", "size": int, "digest": str, "details": DETAILS}
SHOWN = {
    "modelfile": 'FROM tiny\nPARAMETER temperature 0.5\nTEMPLATE """{{ messages }}"""',
    "parameters": "temperature 0.5",
    "template": "{{ messages }}",
    "license": "",
    "details": DETAILS,
    "model_info": {
        "general.architecture": "llama",
        "general.parameter_count": 134515008,
        "llama.context_length": 1000,
    },
    "capabilities": ["completion"],
    "modified_at": str,
}
MANIFEST, DONE = {"status": "pulling manifest"}, {"status": "success"}
LAYER = {"status": str, "digest": str, "total": int, "completed": int}


def chat(answer: Any, status: int = 200, *, stream: bool = False, **fields: Any) -> Row:
    return Row(SOURCE, CHAT, {"messages": HELLO, "stream": stream, **fields}, status, answer)


def generate(answer: Any, status: int = 200, *, stream: bool = False, **fields: Any) -> Row:
    return Row(SOURCE, GENERATE, {"prompt": "Hi", "stream": stream, **fields}, status, answer)


TABLE: dict[str, Row] = {
    "chat": chat(END | SAID),
    "chat of a tagged name": chat({"model": "tiny:latest"}, model="tiny:latest"),
    "streamed chat": chat(
        [
            PART | {"message": {"role": "assistant", "content": "a"}},
            PART | {"message": {"content": "b"}},
            END | {"message": {"content": ""}},
        ],
        stream=True,
    ),
    "load": chat({"done_reason": "load", "done": True}, messages=[]),
    "unload": chat({"done_reason": "unload"}, messages=[], keep_alive=0),
    "generate": generate(END | WROTE),
    "streamed generate": generate(
        [PART | {"response": "a"}, PART | {"response": "b"}, END | {"response": "",
                                                                  "context": list}],
        stream=True,
    ),
    "raw": generate(END | {"response": "ab", "context": ABSENT}, raw=True),
    "context": generate(END | WROTE, context=[97, 98]),
    "limit": generate({"done_reason": "length", "eval_count": 1}, options={"num_predict": 1}),
    "context length": generate(END | WROTE, options={"num_ctx": 500}),
    "beyond the context length": generate(ERROR, 400, options={"num_ctx": 4}),
    "chat beyond the context length": chat(ERROR, 400, options={"num_ctx": 4}),
    "whole prompts only": chat(END | SAID, truncate=False),
    "moved context": chat(ERROR, 400, shift=True),
    "context of a raw prompt": generate(ERROR, 400, raw=True, context=[97]),
    "context of unknown tokens": generate(ERROR, 400, context=[999]),
    "typical": generate(END | WROTE, options={"typical_p": 0.5}),
    "window of penalties": generate(
        ERROR, 400, options={"repeat_penalty": 1.1, "repeat_last_n": 64}
    ),
    "mirostat": generate(ERROR, 400, options={"mirostat": 1}),
    "images": generate(ERROR, 400, images=["eA=="]),
    "unknown model": chat(ERROR, 404, model="other"),
    "models": Row(SOURCE, "/api/tags", None, 200, {"models": [CARD | {"modified_at": str}]}),
    "running": Row(
        SOURCE, "/api/ps", None, 200, {"models": [CARD | {"expires_at": str, "size_vram": 0}]}
    ),
    "version": Row(SOURCE, "/api/version", None, 200, {"version": str}),
    "show": Row(SOURCE, "/api/show", {"model": "tiny"}, 200, SHOWN),
    "show of an unknown model": Row(SOURCE, "/api/show", {"model": "other"}, 404, ERROR),
    "show of no model": Row(SOURCE, "/api/show", {}, 400, ERROR),
    "pull": Row(SOURCE, "/api/pull", {"model": "tiny"}, 200, [MANIFEST, LAYER, DONE]),
    "pull at once": Row(SOURCE, "/api/pull", {"name": "tiny", "stream": False}, 200, DONE),
    "pull of an unknown model": Row(SOURCE, "/api/pull", {"model": "other"}, 404, ERROR),
    "embed": Row(SOURCE, "/api/embed", {"input": "a"}, 400, ERROR),
}  # fmt: skip


def make_server(text: str = "ab", **api: Any) -> FakeServer:
    tokenizer = CharTokenizer()
    tokenizer.template_source = "{{ messages }}"
    server = FakeServer(FakeEngine(text=text), tokenizer=tokenizer, config=make_config(**api))
    server.generation_defaults = {"temperature": 0.5}
    server.facts = SimpleNamespace(  # type: ignore[assignment]
        architecture="LlamaForCausalLM", num_parameters=134515008
    )
    return server


@pytest.mark.parametrize("name", TABLE)
async def test_a_request_is_answered_as_ollama_does(name: str) -> None:
    await check_row(TABLE[name], make_server())


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize(
    ("options", "raw", "limit"),
    [
        ({"num_ctx": 100}, False, 100),
        ({"num_ctx": 100, "num_predict": 5}, False, None),
        ({"num_ctx": 100, "num_predict": 200}, False, 100),
        ({"num_ctx": 5000}, False, 1000),
        ({"num_ctx": 100}, True, 100),
    ],
)
async def test_an_answer_fills_the_context_that_was_asked_for(
    path: str, options: Any, raw: bool, limit: int | None
) -> None:
    server = make_server()
    fields = {"messages": HELLO} if path == CHAT else {"prompt": "Hi", "raw": raw}
    await ask(path, server, options=options, **fields)
    (request,) = server.client.requests
    found = request.sampling.max_tokens
    assert found == (5 if limit is None else limit - len(request.prompt_ids))


async def test_an_answers_context_continues_it() -> None:
    server = make_server()
    first = (await ask(GENERATE, server, prompt="Hi", stream=False)).json()
    await ask(GENERATE, server, prompt="Yes", stream=False, context=first["context"])
    assert prompt_of(server, 1) == "<|user|>Hi<|assistant|>ab<|user|>Yes<|assistant|>"


async def test_the_time_before_the_models_work_is_told_apart() -> None:
    answer = (await ask(CHAT, make_server(), messages=HELLO, stream=False)).json()
    assert answer["load_duration"] > 0
    parts = [answer[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert sum(parts) <= answer["total_duration"] + len(parts)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 900}]}),
        (GENERATE, {"prompt": "x" * 900, "raw": True}),
    ],
)
async def test_a_prompt_is_cut_unless_the_request_forbids_it(path: str, fields: Any) -> None:
    for truncate, status in ((None, 200), (True, 200), (False, 400)):
        server = make_server(prompt_truncation="head")
        server.plan = make_plan(max_model_len=500)
        response = await ask(path, server, truncate=truncate, **fields)
        assert response.status_code == status, response.text


async def test_a_license_is_shown(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("Do as you like.")
    server = make_server()
    server.plan = replace(server.plan, model_path=tmp_path)
    assert (await ask("/api/show", server, model="tiny")).json()["license"] == "Do as you like."
