"""Parameter counts for published config.json files.

Each line of `published.jsonl` has a config, the number of published parameters (`parameters`), and
the number of those in a pooler that embeddings do not use (`unread`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remora.configs.sections.pooling import PoolingSection
from remora.engine.pooling.facts import pooling_task, read_pooling_facts
from remora.engine.pooling.load import pooling_model_facts

FILE = Path(__file__).parent / "published.jsonl"
PUBLISHED = {entry["name"]: entry for entry in map(json.loads, FILE.read_text().splitlines())}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_makes_a_model_of_the_published_size(tmp_path: Path, name: str) -> None:
    entry = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
    task = pooling_task(tmp_path, "auto")
    assert task is not None

    model = pooling_model_facts(tmp_path, {})
    head = read_pooling_facts(tmp_path, task, PoolingSection(), hidden_size=model.hidden_size)

    counted = model.num_parameters + head.num_parameters
    assert counted == entry["parameters"] - entry["unread"]
