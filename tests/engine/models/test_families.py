"""Every dense family against transformers, in float32, as a user would load it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.engine.models.registry import load_model
from tests.engine.models.families import CASES, make_family
from tests.engine.models.paged_model import PagedModel
from tests.tiny_models import VOCAB_SIZE

TOLERANCE = 2e-4
NUM_TOKENS = 60  # more than two windows and three pages


def make_ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Let tiny products be computed by one thread: several wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    return make_family(tmp_path_factory.mktemp("family"), request.param)


def load(path: Path) -> PagedModel:
    model = load_model(
        path, dtype=torch.float32, load_format="auto", device="cpu", show_progress=False
    )
    return PagedModel(model)


@torch.inference_mode()
def oracle_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def assert_same(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_logits_and_greedy_tokens_equal_those_of_transformers(
    checkpoint: tuple[Path, Any],
) -> None:
    path, oracle = checkpoint
    paged, ids, other = load(path), make_ids(NUM_TOKENS), make_ids(30, seed=1)
    expected = oracle_logits(oracle, ids)
    assert expected.std() > 0.01

    whole = paged.step(whole=ids)["whole"]
    chunks = [ids[0:7], ids[7:8], ids[8:40], ids[40:59]]
    parts = [paged.step(parts=chunk)["parts"] for chunk in chunks]
    mixed = paged.step(parts=ids[59:], other=other)
    paged.step(one=ids[:20])
    one_by_one = [paged.step(one=[token])["one"] for token in ids[20:]]

    assert_same(whole, expected)
    assert_same(torch.cat([*parts, mixed["parts"]]), expected)
    assert_same(mixed["other"], oracle_logits(oracle, other))
    assert_same(torch.cat(one_by_one), expected[20:])
    token, made = int(expected[-1].argmax()), list(ids)
    for _ in range(4):
        made.append(token)
        token = int(paged.step(whole=[token], one=[token])["whole"][0].argmax())
        assert token == int(oracle_logits(oracle, made)[-1].argmax())
