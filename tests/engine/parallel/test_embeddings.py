"""Prompts given as embeddings on several ranks: the rows of the table are as good as ids."""

from __future__ import annotations

from typing import Any

import pytest

from remora.engine.embeddings import PromptEmbeddings
from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load_f32
from tests.engine.models.test_parity import make_prompts
from tests.engine.parallel.runs import Requests, run

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    "ranks", [{"tp_size": 2}, {"pp_size": 2, "micro_batches": 3}], ids=["shares", "stages"]
)
def test_every_rank_begins_with_the_given_rows(
    ranks: dict[str, Any], tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    table = load_f32(path).embedding.weight
    long, short = make_prompts([50, 5])
    expected = run(path, {"long": (long, GREEDY), "short": (short, GREEDY)})
    given: Requests = {
        "long": (PromptEmbeddings(table[long].numpy()), GREEDY),
        "short": (short, GREEDY),
    }

    found = run(path, given, embedding_size=table.shape[1], **ranks)

    assert found.token_ids == expected.token_ids
