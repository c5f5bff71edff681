"""/v1/score: probabilities of labels after a query and each item."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from remora.deployments.http.sglang import score as scoring
from tests.conftest import TinyCheckpoints
from tests.deployments.fakes import FakeServer
from tests.deployments.http.streams import ask
from tests.deployments.pooling_replica import replica

QUERY = [17, 300, 42]
ITEMS = [[5, 6, 7], [8], [99, 100]]
LABELS = [3, 511, 42]
SECTIONS = {"model": {"dtype": "float32"}, "engine": {"kv_tokens": 2048, "num_threads": 1}}


async def scores(client: httpx.AsyncClient, **fields: Any) -> Any:
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | fields
    response = await client.post("/v1/score", json=body)
    assert response.status_code == 200, response.text
    return response.json()["scores"]


async def test_scores_of_items_are_those_of_separate_calls_and_add_up(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(tiny_checkpoints("llama"), monkeypatch, **SECTIONS) as (client, _):
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
    body: dict[str, Any] = {"query": "ab", "items": ["c", "de"], "label_token_ids": [80, 33]}
    answer = (await ask("/v1/score", server, **body)).json()

    asked = ["".join(map(chr, request.prompt_ids)) for request in server.client.requests]
    assert asked == ["abc", "abde"]
    assert answer["scores"] == [[math.exp(-0.5), math.exp(-1.5)]] * 2
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
