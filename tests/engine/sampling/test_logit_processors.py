"""Processors of logits: the operator's functions, asked for by name, over one row at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from remora.configs.errors import ConfigError, EngineError, InvalidSampling
from remora.engine.llm import LLM, SamplingParams
from remora.engine.sampling.logit_processors import load_processors
from remora.engine.sampling.sampler import Sampler
from tests.conftest import TinyCheckpoints
from tests.engine.sampling.sampled import EOS, VOCAB_SIZE, make_logits, make_row, rows

HERE = __name__


def only(logits: Tensor, token_ids: Sequence[int], params: Mapping[str, Any]) -> None:
    """Let one token through."""
    kept = logits[params["id"]].clone()
    logits.fill_(-float("inf"))
    logits[params["id"]] = kept


class Counting:
    """Let through the token after the last one; has a life for each row."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: Tensor, token_ids: Sequence[int], params: object) -> None:
        self.calls += 1
        only(logits, token_ids, {"id": (token_ids[-1] + 1) % len(logits)})


def failing(logits: Tensor, token_ids: Sequence[int], params: object) -> None:
    raise RuntimeError("no such thing")


def spoiling(logits: Tensor, token_ids: Sequence[int], params: object) -> None:
    logits[0] = float("nan")


def make_sampler() -> Sampler:
    return Sampler(
        max_rows=8,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        processors={"only": only, "count": Counting, "fail": failing, "spoil": spoiling},
    )


def test_a_row_s_processor_changes_its_logits_and_no_others() -> None:
    sampler = make_sampler()
    plain = make_row(0, [1, 2], temperature=0.0)
    steered = make_row(
        1, [1, 2], temperature=0.0, custom_logit_processor="only", custom_params={"id": 77}
    )
    for init in (plain, steered):
        sampler.add_row(init)
    logits = make_logits(3, 2)
    expected = int(logits[0].argmax())
    sampled = sampler.sample(logits, rows(0, 1))
    assert sampled.token_ids.tolist() == [expected, 77]


def test_a_class_has_a_life_for_each_row_and_is_told_of_its_tokens() -> None:
    sampler = make_sampler()
    for row, prompt in ((0, [10]), (1, [40])):
        sampler.add_row(make_row(row, prompt, temperature=0.0, custom_logit_processor="count"))
    found = [
        sampler.sample(make_logits(seed, 2), rows(0, 1)).token_ids.tolist() for seed in range(3)
    ]
    assert found == [[11, 41], [12, 42], [13, 43]]


def test_it_sees_what_bans_and_penalties_have_left() -> None:
    sampler = make_sampler()
    asked: Any = {"custom_logit_processor": "only", "custom_params": {"id": EOS}}
    sampler.add_row(make_row(0, [1], temperature=0.0, min_tokens=3, **asked))
    sampled = sampler.sample(make_logits(1), rows(0))
    assert 0 in sampled.bad_rows  # the only token that it lets through is banned


@pytest.mark.parametrize(
    ("name", "reason"),
    [("fail", "failed: RuntimeError: no such thing"), ("spoil", "made a logit NaN")],
)
def test_one_that_fails_ends_its_row_only(name: str, reason: str) -> None:
    sampler = make_sampler()
    sampler.add_row(make_row(0, [1], custom_logit_processor=name))
    sampler.add_row(make_row(1, [1], temperature=0.0))
    logits = make_logits(2, 2)
    expected = int(logits[1].argmax())
    sampled = sampler.sample(logits, rows(0, 1))
    assert str(sampled.bad_rows[0]) == f"the logit processor {name} {reason}"
    assert sampled.bad_rows.keys() == {0}
    assert sampled.token_ids[1] == expected


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_colon", "expected module:attribute"),
        ("no_such_module_here:f", "cannot be imported"),
        (f"{HERE}:nothing", "cannot be imported"),
        (f"{HERE}:HERE", "expected a function or a class"),
    ],
)
def test_what_cannot_be_had_is_told_at_the_start(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.logit_processors: x = {path}: {why}"):
        load_processors({"x": path})


@pytest.mark.observes("engine.logit_processors")
def test_an_engine_runs_them_by_the_names_of_its_configuration(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "our_edits.py").write_text(
        "def only(logits, token_ids, params):\n"
        "    logits[: params['id']] = -float('inf')\n"
        "    logits[params['id'] + 1 :] = -float('inf')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    llm = LLM(
        str(tiny_checkpoints("llama")),
        dtype="float32",
        kv_tokens=512,
        num_threads=1,
        show_progress=False,
        logit_processors={"only": "our_edits:only"},
    )
    wanted = SamplingParams(
        max_tokens=4, temperature=0.0, custom_logit_processor="only", custom_params={"id": 300}
    )
    (output,) = llm.generate([[1, 2, 3]], wanted)
    assert output.token_ids == [300] * 4
    with pytest.raises(InvalidSampling, match="custom_logit_processor is 'other'; use one of only"):
        llm.generate([[1]], SamplingParams(custom_logit_processor="other"))
    broken = SamplingParams(custom_logit_processor="only", custom_params={})
    with pytest.raises(EngineError, match="the logit processor only failed: KeyError"):
        llm.generate([[1]], broken)
