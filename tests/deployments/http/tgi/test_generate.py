"""Responses of /generate, /generate_stream and /, in TGI's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import EngineError
from tests.deployments.fakes import EOS, FakeEngine, FakeServer, make_client, make_plan
from tests.deployments.http.golden import check_golden
from tests.deployments.http.streams import ask


async def post(
    path: str = "/generate",
    server: FakeServer | None = None,
    *,
    stream: bool | None = None,
    **parameters: Any,
) -> httpx.Response:
    fields = {} if stream is None else {"stream": stream}
    return await ask(path, server, inputs="ab", parameters=parameters, **fields)


ENDED = {"text": "a" + chr(EOS)}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # path, fields of the body, attributes of the engine
    "text, which never streams here": ("/generate", {"stream": True, "max_new_tokens": 3}, {}),
    "full text": ("/generate", {"return_full_text": True}, {}),
    "root": ("/", {"max_new_tokens": 1}, {}),
    "details": (
        "/generate",
        {"max_new_tokens": 1, "details": True, "decoder_input_details": True, "top_n_tokens": 2},
        {},
    ),
    "stop": ("/generate", {"details": True}, {}),
    "stop text": ("/generate", {"details": True}, {"stopped_by": "."}),
    "stop token": ("/generate", {"details": True}, {"stopped_by": 46}),
    "end of sequence": ("/generate", {"details": True}, ENDED),
    "best of three": (
        "/generate",
        {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 1},
        {},
    ),
    "stream": ("/generate_stream", {"max_new_tokens": 2}, {}),
    "stream of the root": ("/", {"stream": True, "max_new_tokens": 2}, {}),
    "late error": ("/generate_stream", {}, {"error": EngineError("x"), "fail_at": 1}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_reply_is_as_it_has_always_been(name: str) -> None:
    path, fields, engine = CASES[name]
    server = FakeServer(FakeEngine(**engine))
    check_golden(Path(__file__).parent, name, await post(path, server, **fields))


async def test_the_seed_of_a_draw_is_told() -> None:
    server = FakeServer()
    details = (await post(server=server, do_sample=True, details=True)).json()["details"]
    assert details["seed"] == server.client.requests[0].sampling.seed


async def test_an_output_fills_the_context_and_a_prompt_may_be_cut() -> None:
    server = FakeServer(plan=make_plan(max_model_len=12))
    await post(server=server)
    await post(server=server, truncate=1)
    assert server.client.requests[0].sampling.max_tokens == 10  # the remaining context
    assert server.client.requests[1].prompt_ids == [98]


async def test_info_names_the_model_and_its_limits() -> None:
    async with make_client() as client:
        info = (await client.get("/info")).json()
    assert info["model_id"] == "tiny"
    assert info["max_total_tokens"] == 1000
