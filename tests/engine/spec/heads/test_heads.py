"""EAGLE, EAGLE-3 and MTP heads draft what plain implementations draft, and change no output."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.engine.llm import LLM, SamplingParams
from remora.engine.spec.controller import FixedController
from tests.conftest import TinyCheckpoints
from tests.engine.spec.heads import plain
from tests.engine.spec.heads.watched import Watched

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "cpu_kernels": "native",
    "num_threads": 1,
    "kv_tokens": 4096,
    "max_running_requests": 8,
    "max_step_tokens": 64,
    "prefill_chunk_tokens": 32,
    "show_progress": False,
}
DRAFTS = 3
PROMPTS = [[3, 4, 5, 6] * 20, [7, 8, 9], list(range(3, 40)), [3, 4, 5, 6] * 18 + [9]]
LENGTHS = [12, 30, 17, 24]


class NowAndThen(FixedController):
    """Allows drafts in every fifth step of a row."""

    def __init__(self) -> None:
        super().__init__(DRAFTS)
        self._calls: Counter[int] = Counter()

    def limit(self, key: int, num_rows: int, *, is_free: bool = False) -> int:
        self._calls[key] += 1
        return 0 if self._calls[key] % 5 else DRAFTS


def check(
    path: Path,
    keys: dict[str, Any],
    head: plain.PlainHead,
    kernels: str,
    *,
    always: bool = True,
) -> None:
    """Compare drafts of every step with the plain head's, and outputs with those without drafts."""
    common = COMMON | {"cpu_kernels": kernels}
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in LENGTHS
    ]
    without = LLM(str(path), **common)
    want = without.generate(PROMPTS, params)
    without.close()
    llm = LLM(str(path), speculation={"max_drafts": DRAFTS, "adaptive": False, **keys}, **common)
    watched = Watched(llm._engine)
    speculation = llm._engine._scheduler.speculation
    assert speculation is not None
    if not always:
        speculation._controller = NowAndThen()

    done = llm.generate(PROMPTS, params)

    assert [each.completions for each in done] == [each.completions for each in want]
    llm._engine.check_integrity()
    assert len(watched.drafts) > (50 if always else 10)
    watched.check(head, {*llm.tokenizer.eos_token_ids})
    # From now on prompts are found in the prefix cache, with the head's KV.
    again = llm.generate(PROMPTS, params)
    assert [each.completions for each in again] == [each.completions for each in want]
    assert sum(each.num_cached_tokens for each in again) > 0
    llm.close()


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("bias", "pickled"), [(True, False), (False, True)])
def test_eagle(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, kernels: str, bias: bool, pickled: bool
) -> None:
    path = tiny_checkpoints("llama")
    folder = plain.write_eagle(tmp_path / "head", path, bias=bias, pickled=pickled)
    keys = {"method": "eagle", "draft_model": str(folder)}
    check(path, keys, plain.eagle_head(path, folder), kernels, always=bias)


@pytest.mark.parametrize(
    ("settings", "captures", "draft_vocab"),
    [
        ({}, (2, 2, 1), plain.DRAFT_VOCAB),  # of 4 layers: 2, half, and the third from the end
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}, (0, 2, 3), None),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, (2, 2, 3), 100),
    ],
)
def test_eagle_3(
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
    kernels: str,
    settings: dict[str, Any],
    captures: tuple[int, int, int],
    draft_vocab: int | None,
) -> None:
    path = tiny_checkpoints("llama", num_hidden_layers=4)
    folder = plain.write_eagle_3(tmp_path / "head", path, draft_vocab=draft_vocab, **settings)
    keys = {"method": "eagle", "draft_model": str(folder)}
    check(path, keys, plain.eagle_3_head(path, folder, captures), kernels)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("deepseek-v3", "DeepseekV3ForCausalLM"), ("qwen2.5-tied", "MiMoForCausalLM")],
)
def test_mtp(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, kernels: str, family: str, architecture: str
) -> None:
    path = shutil.copytree(tiny_checkpoints(family, tie_word_embeddings=False), tmp_path / "model")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "architectures": [architecture]}))
    own = plain.add_mtp(path)
    check(path, {"method": "mtp"}, plain.mtp_head(path, own), kernels)


def test_a_head_for_another_model_is_refused(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama")
    folder = plain.write_eagle(tmp_path / "head", path, bias=False)
    raw = json.loads((folder / "config.json").read_text())
    for changes, says in (
        ({"hidden_size": 48, "head_dim": 8}, "trained for another model"),
        ({"architectures": ["GemmaForCausalLM"]}, "known draft heads are"),
    ):
        (folder / "config.json").write_text(json.dumps({**raw, **changes}))
        with pytest.raises(ConfigError, match=says):
            LLM(
                str(path),
                speculation={"method": "eagle", "draft_model": str(folder)},
                **COMMON,
            )
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"is a whole model.*method to draft"):
        LLM(str(path), speculation={"method": "eagle", "draft_model": str(path)}, **COMMON)
    with pytest.raises(ConfigError, match="the checkpoint has no MTP layers"):
        LLM(str(path), speculation={"method": "mtp"}, **COMMON)
