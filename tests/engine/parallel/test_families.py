"""Every dense family on two ranks, beside the same model on one, in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from remora.engine.types import SamplingParams
from tests.engine.models.families import CASES, make_family
from tests.engine.models.test_parity import make_prompts
from tests.engine.parallel.runs import run
from tests.thinned import thinned

TOLERANCE = 2e-4
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
LONG, SHORT = make_prompts([30, 5])
REQUESTS = {"long": (LONG, GREEDY), "short": (SHORT, GREEDY)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", thinned(((family,) for family in CASES), 2))
def test_two_ranks_give_what_one_gives(family: str, tmp_path: Path) -> None:
    path, _ = make_family(tmp_path, family)
    expected = run(path, REQUESTS)

    found = run(path, REQUESTS, tp_size=2)

    assert found.token_ids == expected.token_ids
    assert len(found.steps) == len(expected.steps)
    for logits, exact in zip(found.steps, expected.steps, strict=True):
        torch.testing.assert_close(logits, exact, atol=TOLERANCE, rtol=0)
