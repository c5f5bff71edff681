"""/openapi.json: every operation is described, and its responses are as described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.fakes import FakeServer, client_of, make_app, make_config
from tests.deployments.http.api_docs.described import check_described
from tests.deployments.http.core.test_schemathesis import EXAMPLES

Described = dict[str, Any]


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Described:
    folder = str(tmp_path_factory.mktemp("batches"))
    return make_app(FakeServer(config=make_config(batch_dir=folder))).openapi()


def operations(description: Described) -> Iterator[tuple[str, Described]]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_operation_has_a_summary_of_its_own(description: Described) -> None:
    found = dict(operations(description))
    counts = Counter(operation["summary"] for operation in found.values())
    groups = {tag["name"] for tag in description["tags"]}

    assert [summary for summary, count in counts.items() if count > 1] == []
    # FastAPI makes a default summary of the function's name, and no description.
    assert [at for at, operation in found.items() if not operation.get("description")] == []
    assert [at for at, operation in found.items() if operation["tags"][0] not in groups] == []
    assert len({operation["operationId"] for operation in found.values()}) == len(found)


def test_every_operation_has_a_described_response(description: Described) -> None:
    for at, operation in operations(description):
        responses = operation["responses"]
        if list(responses) == ["400"]:  # refused in any case
            assert operation["description"].startswith(("Not offered", "As POST", "Always refused"))
            continue
        assert responses["200"]["description"] not in ("", "Successful Response"), at
        for kind, content in responses["200"].get("content", {}).items():
            assert content["schema"], f"{at}: {kind}"
        assert "422" not in responses  # arguments that are not valid are a 400


def test_every_reference_leads_to_a_schema(description: Described) -> None:
    schemas = description["components"]["schemas"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            for part in value.values():
                yield from references(part)
        elif isinstance(value, list):
            for part in value:
                yield from references(part)

    names = {reference.rpartition("/")[2] for reference in references(description)}
    assert names <= schemas.keys()
    assert "HTTPValidationError" not in schemas


async def test_responses_are_as_described(description: Described, tmp_path: Path) -> None:
    app = make_app(FakeServer(config=make_config(batch_dir=str(tmp_path))))
    num_checked = 0
    async with client_of(app) as client:
        for at, _ in operations(description):
            method, path = at.split()
            if "{" in path:
                continue
            body = None if method == "GET" else EXAMPLES.get(path, {})
            response = await client.request(method, path, json=body)
            num_checked += check_described(description, response)
    assert num_checked > 60
