"""The fields of pooling bodies, at tiny models: see `observing.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remora.engine.types import Output, Request
from tests.deployments.http.fields.observing import Api, faults_of
from tests.deployments.http.fields.pooling import CLASSIFIER, EMBEDDER, RERANKER
from tests.deployments.pooling_replica import replica
from tests.tiny_encoders import make_tiny_encoder

PROMPTS = {"prompts": {"query": "find: "}, "dimensions": [8, 48]}
# Server: its APIs, the model, and the section `pooling`.
SERVERS: dict[str, tuple[Mapping[str, Api], dict[str, Any], dict[str, Any]]] = {
    "embedder": (EMBEDDER, {"family": "bert"}, PROMPTS),
    "reranker": (RERANKER, {"family": "bert", "classifies": True, "num_labels": 1}, {}),
    "classifier": (CLASSIFIER, {"family": "distilbert", "classifies": True, "num_labels": 3}, {}),
}


def recording(engine: Any) -> SimpleNamespace:
    """Return a record of what an engine is asked, in the place of a fake server."""
    requests: list[Request] = []
    generate = engine.generate

    async def recorded(request: Request) -> AsyncGenerator[Output, None]:
        requests.append(dataclasses.replace(request, prompt_ids=list(request.prompt_ids)))
        async for output in generate(request):
            yield output

    engine.generate = recorded
    return SimpleNamespace(
        client=SimpleNamespace(requests=requests, text=""),
        grammars=SimpleNamespace(asked=[]),
        tokenizer=SimpleNamespace(rendered=[]),
    )


@pytest.mark.parametrize("name", SERVERS)
async def test_a_field_is_seen_refused_or_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    apis, model, pooling = SERVERS[name]
    make_tiny_encoder(tmp_path, **model)
    async with replica(tmp_path, monkeypatch, pooling=pooling) as (client, server):
        record = recording(server._served.client)
        faults = [
            f"{api.path}: {fault}"
            for api in apis.values()
            for fault in await faults_of(api, client, record)
        ]

    assert not faults, "\n".join(faults)
