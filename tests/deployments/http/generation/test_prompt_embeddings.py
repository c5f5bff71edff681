"""Prompts given as embeddings, in SGLang's /generate and in /v1/completions."""

from __future__ import annotations

import base64
import io
import json
import pickle
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from remora.configs.errors import ConfigError
from remora.configs.planning.fallback import check_fallback
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.types import Request
from tests.deployments.fakes import FakeServer, make_plan, make_server_config
from tests.deployments.http.streams import ask, events
from tests.engine.configured import MODEL

H = 4
ROWS = [[0.5, -1, 2, 3e-3], [1, 2, 3, 4], [0, 0, 0, 0.25]]
OTHER = [[9.0, 8.0, 7.0, 6.0]]
COMPLETIONS, GENERATE = "/v1/completions", "/generate"
FIELDS = {COMPLETIONS: "prompt_embeds", GENERATE: "input_embeds"}
BOTH = pytest.mark.parametrize("path", FIELDS)


def make_server(*, is_on: bool = True, size: int | None = H, **sections: Any) -> FakeServer:
    api = {"prompt_embeddings": is_on} | sections.pop("api", {})
    return FakeServer(
        config=make_server_config(api=api, **sections), plan=make_plan(embedding_size=size)
    )


async def post(path: str, server: FakeServer, value: Any, **body: Any) -> httpx.Response:
    return await ask(path, server, **{FIELDS[path]: value}, **body)


def rows_of(request: Request) -> npt.NDArray[np.float32]:
    assert isinstance(request.embeddings, PromptEmbeddings)
    assert list(request.prompt_ids) == [0] * len(request.embeddings)
    return request.embeddings.rows


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_file(rows: Any, dtype: Any = np.float32) -> str:
    return in_base64(save({"prompt": np.array(rows, dtype)}))


@pytest.mark.observes("api.prompt_embeddings")
@BOTH
async def test_rows_of_numbers_reach_the_engine(path: str) -> None:
    server = make_server()
    response = await post(path, server, ROWS)
    assert response.status_code == 200, response.text
    (request,) = server.client.requests
    assert np.array_equal(rows_of(request), np.array(ROWS, np.float32))
    answer = response.json()
    usage = answer["usage"] if path == COMPLETIONS else answer["meta_info"]
    assert usage["prompt_tokens"] == 3


@BOTH
async def test_they_are_off_unless_the_operator_turns_them_on(path: str) -> None:
    response = await post(path, make_server(is_on=False), ROWS)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, FIELDS[path])
    assert error["code"] == "unsupported"
    assert "api.prompt_embeddings" in error["message"]


@BOTH
async def test_several_prompts_are_answered_in_order(path: str) -> None:
    server = make_server()
    response = await post(path, server, [ROWS, OTHER])
    assert response.status_code == 200, response.text
    assert [len(rows_of(request)) for request in server.client.requests] == [3, 1]
    answer = response.json()
    assert len(answer["choices"] if path == COMPLETIONS else answer) == 2


async def test_a_list_of_one_prompt_gets_a_list() -> None:
    answer = (await post(GENERATE, make_server(), [ROWS])).json()
    assert isinstance(answer, list)
    assert len(answer) == 1


async def test_a_stream_begins_with_them_too() -> None:
    server = make_server()
    response = await post(COMPLETIONS, server, ROWS, stream=True, return_token_ids=True)
    first = events(response)[0]["choices"][0]
    assert first["prompt_token_ids"] is None
    assert first["token_ids"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
async def test_a_safetensors_file_in_base64_is_read(dtype: Any) -> None:
    server = make_server()
    response = await post(COMPLETIONS, server, as_file(ROWS, dtype), prompt="")
    assert response.status_code == 200, response.text
    expected = np.array(ROWS, dtype).astype(np.float32)
    assert np.array_equal(rows_of(server.client.requests[0]), expected)


async def test_bfloat16_is_widened_and_files_and_rows_mix() -> None:
    server = make_server()
    rows = torch.tensor(ROWS).bfloat16()
    file = in_base64(save_torch({"x": rows}, metadata={"by": "a client"}))
    response = await post(COMPLETIONS, server, [file, OTHER], prompt=None)
    assert response.status_code == 200, response.text
    first, second = map(rows_of, server.client.requests)
    assert np.array_equal(first, rows.float().numpy())
    assert np.array_equal(second, np.array(OTHER, np.float32))


def make_pickles() -> dict[str, bytes]:
    saved = io.BytesIO()
    torch.save(torch.tensor(ROWS), saved)
    old = io.BytesIO()
    torch.save(torch.tensor(ROWS), old, _use_new_zipfile_serialization=False)
    return {"zip": saved.getvalue(), "old": old.getvalue(), "plain": pickle.dumps(ROWS)}


@pytest.mark.parametrize("kind", ["zip", "old", "plain"])
async def test_a_pickle_is_refused_and_told_what_to_send(kind: str) -> None:
    response = await post(COMPLETIONS, make_server(), in_base64(make_pickles()[kind]))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt_embeds")
    assert "looks like a pickle" in error["message"]
    assert "safetensors.torch.save" in error["message"]


def damaged(header: Any, numbers: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + numbers


F32: dict[str, Any] = {"dtype": "F32", "shape": [1, H], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no safetensors"),
        (b"abc", "no safetensors"),
        ((2**63).to_bytes(8, "little") + b"{}", "no safetensors"),
        ((2).to_bytes(8, "little") + b"{{", "no safetensors"),
        (damaged([]), "0 tensors"),
        (damaged({}), "0 tensors"),
        (damaged({"a": F32, "b": F32}, bytes(16)), "2 tensors"),
        (damaged({"a": F32 | {"dtype": "I64"}}, bytes(32)), "format I64"),
        (damaged({"a": F32 | {"dtype": 5}}, bytes(32)), "format 5"),
        (damaged({"a": 7}), "format None"),
        (damaged({"a": F32 | {"shape": [-1, -4]}}, bytes(16)), "without a shape"),
        (damaged({"a": F32 | {"shape": "ab"}}, bytes(16)), "without a shape"),
        (damaged({"a": F32}, bytes(12)), "damaged"),
        (damaged({"a": F32 | {"data_offsets": [4, 20]}}, bytes(20)), "damaged"),
        (damaged({"a": F32 | {"shape": [2**40, 2**40]}}, bytes(16)), "damaged"),
        (damaged({"a": F32 | {"shape": [4]}}, bytes(16)), r"shape 4; it must be"),
    ],
)
async def test_other_bytes_are_refused_for_what_they_are(data: bytes, said: str) -> None:
    file = in_base64(data) or "===="
    response = await post(COMPLETIONS, make_server(), file)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt_embeds")
    assert said in error["message"] or (not data and "base64" in error["message"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([[1.0, 2.0]], "must be [tokens, 4]"),
        ([[1.0, 2.0, 3.0, 4.0], [1.0]], "rows of 1 and of 4 numbers"),
        ([[1.0, 2.0, 3.0, True]], "numbers only"),
        ([[1.0, 2.0, 3.0, "4"]], "numbers only"),
        ([[1.0, 2.0, 3.0, None]], "numbers only"),
        ([[1.0, 2.0, 3.0, 1e300]], "not finite"),
        ([[1, 2, 3, 10**30]], "not finite in the model's format"),
        ([[1.0, 2.0, 3.0, 4.0], 5], "a list of rows"),
        ([[]], "must be [tokens, 4]"),
        ([[[1.0]], []], "must be"),
        ([1.0, 2.0], "must be"),
        ({"a": 1}, "must be"),
        (7, "must be"),
        (True, "must be"),
    ],
)
@BOTH
async def test_bad_rows_are_refused_by_name(path: str, value: Any, said: str) -> None:
    server = make_server()
    server.plan = make_plan(embedding_size=H, dtype="float16")
    response = await post(path, server, value)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith(FIELDS[path])
    assert said in error["message"]


@BOTH
async def test_the_prompt_at_fault_is_named(path: str) -> None:
    response = await post(path, make_server(), [ROWS, [[1.0]]])
    assert response.json()["error"]["param"] == f"{FIELDS[path]}[1]"


@BOTH
async def test_a_model_without_them_says_so(path: str) -> None:
    response = await post(path, make_server(size=None), ROWS)
    assert response.status_code == 400
    assert "takes no embeddings" in response.json()["error"]["message"]


@BOTH
async def test_a_prompt_that_is_too_long_is_refused_and_not_cut(path: str) -> None:
    server = make_server(api={"prompt_truncation": "head"})
    response = await post(path, server, [[1.0] * H] * (server.plan.max_sequence_tokens + 1))
    assert response.status_code == 400
    assert "maximum" in response.json()["error"]["message"]


async def test_text_is_refused_without_a_way_for_it() -> None:
    response = await post(GENERATE, make_server(), as_file(ROWS))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input_embeds"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "ab"}, "prompt_embeds"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"suffix": "b"}, "suffix"),
        (COMPLETIONS, {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"return_prompt_text": True}, "return_prompt_text"),
        (GENERATE, {"text": "ab"}, "input_embeds"),
        (GENERATE, {"input_ids": [5]}, "input_embeds"),
        (GENERATE, {"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        (GENERATE, {"task_id": "a"}, "task_id"),
    ],
)
async def test_what_needs_token_ids_is_refused_together(
    path: str, fields: dict[str, Any], param: str
) -> None:
    response = await post(path, make_server(), ROWS, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_operators_prompt_scores_leave_them_out() -> None:
    server = make_server(api={"prompt_logprobs": True})
    response = await post(COMPLETIONS, server, ROWS)
    assert response.status_code == 200, response.text
    assert server.client.requests[0].sampling.prompt_logprobs is None


async def test_output_scores_and_hidden_states_work() -> None:
    server = make_server(api={"hidden_states": True})
    response = await post(GENERATE, server, ROWS, return_logprob=True, return_hidden_states=True)
    assert response.status_code == 200, response.text
    assert len(response.json()["meta_info"]["output_token_logprobs"]) > 0


async def test_equal_embeddings_share_a_namespace_and_keys_keep_theirs() -> None:
    server = make_server()
    for value, salt in ((ROWS, None), (ROWS, None), (OTHER, None), (ROWS, "s")):
        await post(GENERATE, server, value, cache_salt=salt)
    first, second, other, salted = [request.namespace for request in server.client.requests]
    assert first == second
    assert len({first, other, salted}) == 3


def test_models_by_transformers_code_refuse_the_key() -> None:
    config = make_server_config(api={"prompt_embeddings": True})
    check_fallback(config, MODEL)
    with pytest.raises(ConfigError, match=r"api\.prompt_embeddings"):
        check_fallback(config, replace(MODEL, implementation="transformers"))
