"""Bodies and parameters made from our own description of the API never bring out a 5xx."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from tests.deployments.fakes import FakeEngine, FakeServer, make_app, make_config

NUM_CASES = 2000
GENERATED = settings(
    database=None,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_generated_case_is_a_server_error(tmp_path: Path) -> None:
    server = FakeServer(FakeEngine(text="ok"), config=make_config(batch_dir=str(tmp_path)))
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(server))
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) == sum(1 for _ in schema.get_all_operations())
    with_bodies = sum(bool(operation.body) for operation in operations)
    asked: Counter[int] = Counter()
    faults: list[str] = []

    for operation, mode in product(operations, GenerationMode):
        num = NUM_CASES // (2 * with_bodies) + 1 if operation.body else 5

        @settings(GENERATED, max_examples=num)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            response = case.call()
            asked[response.status_code] += 1
            if response.status_code >= 500:
                faults.append(f"{case.as_curl_command()}: {response.text}")

        with suppress(Unsatisfiable):  # not every operation can be asked wrongly
            ask()

    assert not faults, "\n".join(faults[:10])
    assert asked.total() >= NUM_CASES
    assert asked[200] > NUM_CASES // 20  # else nothing but refusals was tried
