"""/v1/score: probabilities of labels after a query and each item."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.deployments import llm_server
from remora.deployments.http.sglang import score as scoring
from remora.deployments.llm_server import LLMServer
from tests.conftest import TinyCheckpoints
from tests.deployments.fakes import FakeServer, make_client, make_plan

QUERY = [17, 300, 42]
ITEMS = [[5, 6, 7], [8], [99, 100]]
LABELS = [3, 511, 42]


@asynccontextmanager
async def replica(path: Path) -> AsyncGenerator[httpx.AsyncClient, None]:
    server = LLMServer.__new__(LLMServer)
    model = {"path": str(path), "dtype": "float32"}
    engine = {"kv_tokens": 2048, "num_threads": 1}
    await server.__init__({"model": model, "engine": engine})  # type: ignore[misc]
    transport = httpx.ASGITransport(app=server.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://remora") as client:
        yield client
    server.client.close()


async def scores(client: httpx.AsyncClient, **fields: Any) -> Any:
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | fields
    response = await client.post("/v1/score", json=body)
    assert response.status_code == 200, response.text
    return response.json()["scores"]


async def test_scores_of_items_are_those_of_separate_calls_and_add_up(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_server, "log_through_serve", lambda: None)
    async with replica(tiny_checkpoints("llama")) as client:
        together = await scores(client)
        apart = [(await scores(client, items=[item]))[0] for item in ITEMS]
        everything = await scores(client, label_token_ids=list(range(512)))
        alone = await scores(client, apply_softmax=True)
        swapped = await scores(client, query=ITEMS[0], items=[QUERY], item_first=True)
        monkeypatch.setattr(scoring, "MAX_LOGPROBS", 1)
        asked_again = await scores(client)

    for row, other, all_labels in zip(together, apart, everything, strict=True):
        assert row == pytest.approx(other, abs=1e-5)
        assert sum(all_labels) == pytest.approx(1, abs=1e-4)
        assert row == pytest.approx([all_labels[label] for label in LABELS], abs=1e-5)
    for row, normal in zip(together, alone, strict=True):
        assert normal == pytest.approx([score / sum(row) for score in row], abs=1e-5)
    assert swapped[0] == pytest.approx(together[0], abs=1e-5)
    for row, again in zip(together, asked_again, strict=True):
        assert again == pytest.approx(row, abs=1e-5)


async def test_texts_are_joined_and_told_in_usage() -> None:
    server = FakeServer()
    body = {"query": "ab", "items": ["c", "de"], "label_token_ids": [80, 33]}
    async with make_client(server) as client:
        answer = (await client.post("/v1/score", json=body)).json()

    asked = ["".join(map(chr, request.prompt_ids)) for request in server.client.requests]
    assert asked == ["abc", "abde"]
    assert answer["scores"] == [[math.exp(-0.5), math.exp(-1.5)]] * 2
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": [[1]]}, "items"),
        ({"items": []}, "items"),
        ({"items": ["a" * 2000]}, "items"),
        ({"items": ["a"] * 9}, "items"),
        ({"label_token_ids": [257]}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"query": 1}, "query"),
    ],
)
async def test_what_cannot_be_scored_is_refused(fields: dict[str, Any], param: str) -> None:
    body = {"query": "ab", "items": "c", "label_token_ids": [80]} | fields
    async with make_client(FakeServer(plan=make_plan())) as client:
        response = await client.post("/v1/score", json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
