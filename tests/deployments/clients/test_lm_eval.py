"""lm-eval's local-completions, on one small task with log-likelihoods and generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

pytestmark = pytest.mark.ray

# The last: the word that the model goes on with, right or not (as it does in transformers).
QUESTIONS = [
    ("The capital of France is", ["Paris", "Banana", "Seven"], 0, "Paris"),
    ("Two plus two equals", ["purple", "four", "Paris"], 1, "five"),
    ("The sun rises in the", ["spoon", "seventeen", "east"], 2, "sky"),
    ("Water freezes into", ["ice", "music", "Tuesday"], 0, "a"),
]
COLUMNS = ("question", "choices", "answer", "word")
CHOICE = """
task: remora_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
WRITING = """
task: remora_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{word}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 8, do_sample: false}}
filter_list:
  - name: first-word
    filter: [{{function: regex, regex_pattern: "([A-Za-z]+)"}}, {{function: take_first}}]
metric_list:
  - metric: exact_match
"""


@pytest.mark.parametrize("tokenized", [True, False])
def test_a_small_task(
    server_url: str, model: str, tokenizer: str, tmp_path: Path, tokenized: bool
) -> None:
    data = tmp_path / "data.jsonl"
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "choice.yaml").write_text(CHOICE.format(data=data))
    (tmp_path / "writing.yaml").write_text(WRITING.format(data=data))

    results: Any = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{server_url}/v1/completions",
            "tokenizer": tokenizer,
            "tokenized_requests": tokenized,
            "num_concurrent": 2,
        },
        tasks=["remora_choice", "remora_writing"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )

    assert results["results"]["remora_choice"]["acc,none"] == 1.0
    assert results["results"]["remora_writing"]["exact_match,first-word"] == 1.0
