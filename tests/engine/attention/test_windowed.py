"""Whole engines whose layers with a window have pages of their own, against transformers.

The models' windows are 24 tokens, prompts many times as long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.window_plan import WindowRoom
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.graphs.device_forward import DeviceForward
from remora.engine.llm import LLM
from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.device_runs import Rerun, run
from tests.engine.models.families import CASES, make_family
from tests.engine.models.oracle import Oracle
from tests.engine.models.test_parity import ENDLESS, GREEDY, ids, make_llm, make_prompts
from tests.engine.parallel.runs import run as run_ranks
from tests.tiny_models import make_tiny_tokenizer

WINDOW = 24
LAYERS = {"mistral": (True, True, True), "qwen2": (False, True, True)}
LENGTHS = [1, 5, 33, 70, 150, 300, 260]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch": {"cpu_kernels": "torch"},
    "small chunks": {"prefill_chunk_tokens": 7, "max_step_tokens": 40},
    "no prefix cache": {"prefix_cache": False},
    "large pages": {"page_size": 64, "window_ratio": 0.5},
    "scarce": {"window_ratio": 0.03, "schedule_conservativeness": 0.05},
}


def make_windowed(path: Path, **options: Any) -> LLM:
    llm = make_llm(path, **({"prefill_chunk_tokens": 32, "kv_tokens": 4096} | options))
    assert llm.stats().num_window_pages > 0
    return llm


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", LAYERS)
def test_ids_are_those_of_transformers(
    family: str, variant: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, prompts = tiny_checkpoints(family), make_prompts(LENGTHS)
    oracle, llm = Oracle(path), make_windowed(path, **VARIANTS[variant])

    for _ in range(2):  # from nothing, and after what is still cached
        for prompt, output in zip(prompts, ids(llm, prompts, ENDLESS), strict=True):
            oracle.assert_greedy(prompt, output)

    stats = llm.stats()
    assert stats.num_held_pages == stats.num_held_window_pages == 0
    if variant == "scarce":
        assert stats.preemptions_total > 0
    llm.close()


@pytest.mark.parametrize("family", LAYERS)
def test_a_prompt_is_found_again_within_and_beyond_the_window(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, (prompt,) = tiny_checkpoints(family), make_prompts([200])
    oracle, llm = Oracle(path), make_windowed(path)
    ids(llm, [prompt])

    for cut, cached in ((200, 192), (180, 176), (40, 32), (20, 16)):
        branch = [*prompt[:cut], 7, 8, 9]
        (found,) = llm.generate([branch], GREEDY)
        oracle.assert_greedy(branch, found.token_ids)
        assert found.num_cached_tokens == cached
    llm.close()


@pytest.mark.parametrize("family", LAYERS)
def test_where_pages_are_gone_a_prompt_is_computed_anew(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, prompts = tiny_checkpoints(family), make_prompts([200, 190], seed=3)
    oracle = Oracle(path)
    llm = make_windowed(path, window_ratio=0.05)  # 11 pages, of which a prompt takes most in turn
    first = [generation.token_ids for generation in llm.generate(prompts, GREEDY)]

    for prompt, expected in zip(prompts, first, strict=True):
        short = [*prompt[:100], 5]
        for asked in (prompt, short):
            (found,) = llm.generate([asked], GREEDY)
            oracle.assert_greedy(asked, found.token_ids)
        assert llm.generate([prompt], GREEDY)[0].token_ids == expected
    assert llm.stats().evicted_window_pages_total > 0
    llm.close()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "cohere2", "gpt-oss", "llama4"])
def test_families_with_layers_of_both_kinds(
    family: str, tmp_path: Path, tiny_checkpoints: TinyCheckpoints
) -> None:
    if family in CASES:
        path, _ = make_family(tmp_path, family)
        make_tiny_tokenizer().save_pretrained(path)
    else:
        path = tiny_checkpoints(family)
    prompts = make_prompts([5, 70, 200])
    oracle, llm = Oracle(path), make_windowed(path)

    for prompt, output in zip(prompts, ids(llm, prompts), strict=True):
        oracle.assert_greedy(prompt, output)
    llm.close()


def ask(lengths: list[int]) -> dict[str, tuple[list[int], SamplingParams]]:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = make_prompts(lengths)
    return {f"r{number}": (prompt, params) for number, prompt in enumerate(prompts)}


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_keeps_both_tables(
    family: str, overlap: bool, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, asked = tiny_checkpoints(family), ask([3, 60, 90, 80, 30])
    room = WindowRoom(layers=LAYERS[family], window=WINDOW, num_pages=24, row_pages=12)

    plain = run(path, asked, forward="eager", num_pages=90)
    eager = run(path, asked, forward="eager", windows=room, num_pages=90)
    graph_runner = Rerun()
    device = run(
        path, asked, overlap=overlap, graph_runner=graph_runner, windows=room, num_pages=90
    )

    assert eager.token_ids() == device.token_ids() == plain.token_ids()
    assert graph_runner.num_replayed > 0


@pytest.mark.parametrize("family", LAYERS)
def test_captured_steps_with_prompts_read_both_tables(
    family: str, tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tiny_checkpoints(family), ask([3, 60, 90, 80, 30])
    room = WindowRoom(layers=LAYERS[family], window=WINDOW, num_pages=24, row_pages=12)
    expected = run(path, asked, forward="eager", windows=room, num_pages=90)
    monkeypatch.delattr(DeviceForward, "_launch")

    got = run(
        path,
        asked,
        overlap=True,
        graph_runner=Rerun(),
        make_attention=TritonAttention,
        how=DevicePlan(graph_sizes=(4,), graph_prompt_sizes=(8, 16)),
        windows=room,
        num_pages=90,
    )

    assert got.token_ids() == expected.token_ids()


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2, "micro_batches": 2}])
def test_ranks_keep_both_tables(ranks: dict[str, int], tiny_checkpoints: TinyCheckpoints) -> None:
    torch.set_num_threads(1)
    path, asked = tiny_checkpoints("qwen2"), ask([3, 150, 90])
    room = WindowRoom(layers=LAYERS["qwen2"], window=WINDOW, num_pages=12, row_pages=5)

    made = run_ranks(path, asked, windows=room, **ranks)

    oracle = Oracle(path)
    for name, (prompt, _) in asked.items():
        oracle.assert_greedy(prompt, made.token_ids[name])
