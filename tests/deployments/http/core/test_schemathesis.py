"""Bodies and parameters generated from remora's OpenAPI description never cause a 5xx.

Nearly all bodies generated from a schema alone are refused by validation. So half of the cases
are the description's own example with a few generated fields; these run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from tests.deployments.fakes import FakeEngine, FakeServer, make_app, make_client, make_config

NUM_CASES = 2000
GENERATED = settings(
    database=None,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
JSON = "application/json"
# Bodies that are tested at another path.
ALIKE = {"/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"}
# Paths that a text generation model refuses for any body.
REFUSED = {
    "/infill",  # the tiny model has no tokens for it
    "/v1/embeddings",
    "/api/embed",
    "/api/embeddings",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/predict",
    "/similarity",
    "/score",
    "/classify",
    "/v1/classify",
    "/pooling",
    "/encode",
    "/update_weights_from_disk",  # the server's weights stay, and so does its memory
    "/update_weights_from_tensor",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/save_weights",
}


def examples() -> dict[str, Any]:
    """Return the example bodies of the OpenAPI description, by path."""
    found = {}
    for path, operations in make_app().openapi()["paths"].items():
        body = operations.get("post", {}).get("requestBody", {})
        example = body.get("content", {}).get(JSON, {}).get("example")
        if example is not None:
            found[path] = example
    return found


EXAMPLES = examples()


@st.composite
def grafted(draw: st.DrawFn, cases: st.SearchStrategy[Any], example: dict[str, Any]) -> Any:
    """Draw a case whose body is an example with up to two generated fields."""
    case = draw(cases)
    made = case.body if isinstance(case.body, dict) else {}
    names = sorted(made.keys() - example.keys(), key=repr)
    chosen = draw(st.lists(st.sampled_from(names), max_size=2)) if names else []
    case.body = example | {name: made[name] for name in chosen}
    return case


def strategies(operation: Any, num: int) -> Iterator[tuple[st.SearchStrategy[Any], int]]:
    """Yield strategies for an operation's cases, each with its number of cases; `num` in total."""
    right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    example = EXAMPLES.get(operation.path)
    if operation.body and example is not None:
        yield grafted(right, example), num // 2
        num -= num // 2
    yield right, num // 2
    yield wrong, num - num // 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_generated_case_is_a_server_error(tmp_path: Path) -> None:
    server = FakeServer(FakeEngine(text="ok"), config=make_config(batch_dir=str(tmp_path)))
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(server))
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) == sum(1 for _ in schema.get_all_operations())
    with_bodies = sum(bool(each.body) and each.path not in REFUSED for each in operations)
    asked: Counter[int] = Counter()
    answered: set[str] = set()
    faults: list[str] = []

    for operation in operations:
        has_many = operation.body and operation.path not in REFUSED
        num_cases = NUM_CASES // with_bodies + 12 if has_many else 10
        num_cases //= 3 if operation.path in ALIKE else 1
        for strategy, num in strategies(operation, num_cases):

            @settings(GENERATED, max_examples=num)
            @given(case=strategy)
            def ask(case: Any) -> None:
                response = case.call()
                asked[response.status_code] += 1
                if response.status_code == 200:
                    answered.add(case.operation.path)
                if response.status_code >= 500:
                    faults.append(f"{case.as_curl_command()}: {response.text}")

            with suppress(Unsatisfiable):  # some operations have no invalid cases
                ask()

    assert not faults, "\n".join(faults[:10])
    assert asked.total() >= NUM_CASES
    # Otherwise nearly all cases were refused. Not counted: routes that this configuration switches
    # off (403) and generated ids of things that do not exist (404).
    assert asked[200] > (asked.total() - asked[403] - asked[404]) / 4, asked
    assert answered >= EXAMPLES.keys() - REFUSED


@pytest.mark.parametrize("path", sorted(EXAMPLES.keys() - REFUSED))
async def test_an_example_is_answered(path: str) -> None:
    async with make_client() as client:
        response = await client.post(path, json=EXAMPLES[path])
    assert response.status_code == 200, response.text
    assert "x-remora-ignored-fields" not in response.headers
