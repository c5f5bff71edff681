"""Heads of a model on several ranks: rank 0 drafts, and outputs are those of the same ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.engine.engine import Engine
from remora.engine.launch import build_engine
from remora.engine.types import Request, SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.parallel.teams import ThreadTeam
from tests.engine.parallel.test_renewal import answer, lose, team_of_two
from tests.engine.spec.heads import plain
from tests.engine.spec.heads.watched import Watched

PROMPTS = [[3, 4, 5, 6] * 20, [7, 8, 9], list(range(3, 40))]
DRAFTS = 3


def config_of(path: Path, speculation: dict[str, Any], **parallel: int) -> Any:
    engine = {
        "kv_tokens": 2048,
        "num_threads": 1,
        "cpu_kernels": "torch",
        "max_running_requests": 4,
        "max_step_tokens": 64,
        "prefill_chunk_tokens": 32,
    }
    return parse_args(
        {
            "model": {"path": str(path), "dtype": "float32"},
            "engine": engine,
            "parallel": parallel or {"tp_size": 2},
            "speculation": speculation,
        }
    )


def answers(engine: Engine, temperature: float) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for at, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=15, temperature=temperature, seed=at, ignore_eos=True)
        engine.add(Request(request_id=str(at), prompt_ids=prompt, sampling=sampling))
        found[str(at)] = []
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        engine.check_integrity()
    return found


def run(
    path: Path, speculation: dict[str, Any], head: plain.PlainHead | None = None
) -> list[dict[str, list[int]]]:
    """Return greedy and sampled answers of two ranks; greedy drafts are those of a plain head."""
    team = ThreadTeam()
    built = build_engine(config_of(path, speculation), team=team, show_progress=False)
    watched = None if head is None else Watched(built.engine)
    try:
        found = [answers(built.engine, 0.0)]
        if watched is not None and head is not None:
            assert len(watched.drafts) > 20
            watched.check(head, {*built.tokenizer.eos_token_ids})
        found.append(answers(built.engine, 0.9))
    finally:
        built.engine.close()
        team.join()
    assert not team.errors
    return found


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_ranks_verify_what_a_head_drafts(
    kind: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    speculation: dict[str, Any] = {"method": "eagle", "max_drafts": DRAFTS, "adaptive": False}
    if kind == "mtp":
        source = tiny_checkpoints("qwen2.5-tied", tie_word_embeddings=False)
        path = shutil.copytree(source, tmp_path / "model")
        raw = json.loads((path / "config.json").read_text())
        changed = {**raw, "architectures": ["MiMoForCausalLM"]}
        (path / "config.json").write_text(json.dumps(changed))
        head = plain.mtp_head(path, plain.add_mtp(path))
        speculation["method"] = "mtp"
    elif kind == "eagle":
        path = tiny_checkpoints("llama", tie_word_embeddings=True)
        folder = plain.write_eagle(tmp_path / "head", path, bias=True)
        head = plain.eagle_head(path, folder)
        speculation["draft_model"] = str(folder)
    else:
        path = tiny_checkpoints("llama", num_hidden_layers=4)
        folder = plain.write_eagle_3(tmp_path / "head", path)
        head = plain.eagle_3_head(path, folder, (2, 2, 1))
        speculation["draft_model"] = str(folder)

    assert run(path, speculation, head) == run(path, {"method": "none"})


def test_heads_draft_on_for_new_ranks(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = tiny_checkpoints("llama")
    folder = plain.write_eagle(tmp_path / "head", path, bias=False)
    speculation = {"method": "eagle", "draft_model": str(folder), "adaptive": False}
    with team_of_two(path, speculation=speculation) as (built, team):
        few = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        right = answer(built.engine, "before", few)
        lose(built.engine, team, num_steps=2)
        assert built.renewal is not None
        before = built.engine.stats().draft_tokens_total

        built.renewal.run()

        assert answer(built.engine, "after", few) == right
        assert built.engine.stats().draft_tokens_total > before


def test_pipeline_stages_are_refused(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = tiny_checkpoints("llama")
    folder = plain.write_eagle(tmp_path / "head", path, bias=False)
    speculation = {"method": "eagle", "draft_model": str(folder)}
    config = config_of(path, speculation, pp_size=2)
    with pytest.raises(ConfigError, match=r"method = eagle: .* parallel.pp_size = 2 stages; set"):
        build_engine(config, team=ThreadTeam(), show_progress=False)
