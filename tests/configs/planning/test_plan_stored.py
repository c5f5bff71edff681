"""Plans of quantised checkpoints: bytes as they are held, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.banner import banner
from remora.configs.facts import StoredFormat
from tests.configs.planning.test_plan import make_machine, make_model, plan, refusal

NUMBERS = 80_000_000


def stored(label: str = "awq 4 bits, groups of 128", **changes: Any) -> StoredFormat:
    facts: dict[str, Any] = {
        "number": 210,
        "bits": 4.15625,
        "is_native": True,
        "layers": NUMBERS,
        "head": 0,
    }
    return StoredFormat(label=label, **(facts | changes))


def test_weights_that_are_computed_as_stored_are_counted_as_stored() -> None:
    facts = make_model(stored=(stored(), stored("Q3_K", number=2, is_native=False)))

    made, whole = plan(facts=facts), plan()

    assert whole.weight_bytes - made.weight_bytes == NUMBERS * 2 - NUMBERS * 4.15625 / 8
    assert made.stored == (
        "as stored: 210 awq 4 bits, groups of 128 (4.16 bits a weight); "
        "dequantised to bfloat16: 2 Q3_K (4.16 bits a weight)"
    )
    assert made.stored in banner(made, facts, make_machine(), {}, version="1")


@pytest.mark.parametrize(
    "sections",
    [
        {"engine": {"cpu_kernels": "torch"}},
        {"parallel": {"tp_size": 3}},
        {"model": {"load_format": "dummy"}},
    ],
)
def test_weights_that_torch_computes_are_counted_dequantised(sections: dict[str, Any]) -> None:
    made = plan(facts=make_model(stored=(stored(),)), **sections)

    assert made.weight_bytes == plan(**sections).weight_bytes
    assert "as stored" not in made.stored


def test_weights_are_not_rounded_twice() -> None:
    int8 = {"quantization": "int8"}

    found = refusal(facts=make_model(stored=(stored(),)), model=int8)

    assert "quantised already (awq 4 bits, groups of 128)" in found
    assert plan(facts=make_model(stored=(stored(is_native=False),)), model=int8).weight_bytes > 0
