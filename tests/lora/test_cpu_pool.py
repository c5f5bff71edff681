"""Adapters beside the weights against PEFT: alone, mixed, evicted, preempted, cached, on ranks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError, InvalidAdapter, RequestError
from remora.configs.load import parse_args
from remora.engine.llm import LLM, SamplingParams
from remora.lora.files import WEIGHTS
from remora.lora.setup import configured, pooling
from tests.conftest import TinyCheckpoints
from tests.lora.adapters import ADAPTERS as SHARED
from tests.lora.adapters import ENDS as SHARED_ENDS
from tests.lora.adapters import greedy_ids, make_adapter, run_engine
from tests.tiny_models import COMMON

ADAPTERS: dict[str, dict[str, Any]] = SHARED | {
    "rank-4": {"r": 4, "target_modules": ["v_proj"]},
    "rank-64": {"r": 64, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
}
RANKS = {name: ADAPTERS[name] for name in ("rank-8", "rank-16")}
ENDS = {"ends": SHARED_ENDS}
PROMPT = [17, 300, 42, 99, 256, 8, 77]
NUM_TOKENS = 20
EOS: int = COMMON["eos_token_id"]


@dataclass(frozen=True)
class Trained:
    """Adapters of one model, and what PEFT makes of the prompt with each; None = without any."""

    base: Path
    folders: dict[str, Path]
    expected: dict[str | None, list[int]]


def train(base: Path, folder: Path, settings: dict[str, dict[str, Any]]) -> Trained:
    expected: dict[str | None, list[int]] = {}
    for seed, (name, of_adapter) in enumerate(settings.items()):
        adapted = make_adapter(base, folder / name, seed=seed, **of_adapter)
        expected[name] = greedy_ids(adapted, PROMPT, NUM_TOKENS)
        with adapted.disable_adapter():
            expected[None] = greedy_ids(adapted, PROMPT, NUM_TOKENS)
    assert len({tuple(ids) for ids in expected.values()}) == len(expected)  # or nothing is proved
    return Trained(base, {name: folder / name for name in settings}, expected)


@pytest.fixture(scope="module")
def trained(tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tiny_checkpoints("llama"), tmp_path_factory.mktemp("adapters"), ADAPTERS)


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def make_llm(trained: Trained, *, num_slots: int = 8, **options: Any) -> LLM:
    adapting = pooling(trained.folders, num_slots=num_slots)
    options = {"dtype": "float32", "kv_tokens": 2048, "num_threads": 1} | options
    return LLM(str(trained.base), adapting=adapting, show_progress=False, **options)


def generate(trained: Trained, names: list[str | None], **options: Any) -> list[list[int]]:
    """Let one engine answer the prompt by each of these adapters at a time."""
    llm = make_llm(trained, **options)
    answers = llm.generate([PROMPT] * len(names), greedy(), adapter=names)
    llm.close()
    return [answer.token_ids for answer in answers]


def expected(trained: Trained, names: list[str | None]) -> list[list[int]]:
    return [trained.expected[name] for name in names]


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        *((family, RANKS) for family in ("llama-bias", "qwen2.5-tied", "qwen3")),
        *((family, ENDS) for family in ("llama", "qwen2.5-tied")),  # head and embedding
    ],
)
def test_families_make_the_tokens_that_peft_makes(
    family: str,
    chosen: dict[str, dict[str, Any]],
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
) -> None:
    trained = train(tiny_checkpoints(family), tmp_path, chosen)
    names = [*chosen, None]

    assert generate(trained, names) == expected(trained, names)


def test_all_adapters_and_the_base_share_a_batch(trained: Trained) -> None:
    names = [*ADAPTERS, None, *reversed(ADAPTERS), None]

    assert generate(trained, names) == expected(trained, names)


def test_fewer_slots_than_adapters_make_some_wait_and_come_back(trained: Trained) -> None:
    names = [*ADAPTERS, None, *ADAPTERS, None, *reversed(ADAPTERS)]

    assert generate(trained, names, num_slots=2) == expected(trained, names)


def test_memory_that_is_short_makes_rows_start_anew_with_their_adapters(trained: Trained) -> None:
    names = [*ADAPTERS, None] * 2
    short: dict[str, Any] = {"kv_tokens": 240, "schedule_conservativeness": 0.05}
    llm = make_llm(trained, **short)
    params = SamplingParams(max_tokens=80, temperature=0.0, logit_bias={EOS: -1000.0})

    answers = llm.generate([PROMPT] * len(names), params, adapter=names)

    assert llm.stats().preemptions_total > 0
    assert [answer.token_ids[:NUM_TOKENS] for answer in answers] == expected(trained, names)
    alone = [llm.generate([PROMPT], params, adapter=name)[0].token_ids for name in names[:8]]
    assert [answer.token_ids for answer in answers] == alone * 2
    llm.close()


def test_what_one_adapter_has_cached_no_other_finds(trained: Trained) -> None:
    names = ["rank-8", "rank-8", "rank-16", "rank-8", None]
    llm = make_llm(trained, page_size=16)
    prompts = [PROMPT * 3] * len(names)

    cached = [
        llm.generate([prompt], adapter=name)[0].num_cached_tokens
        for prompt, name in zip(prompts, names, strict=True)
    ]

    assert cached == [0, 16, 0, 16, 0]
    llm.close()


def test_prompts_are_scored_by_the_adapter(trained: Trained) -> None:
    llm = make_llm(trained)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)

    first, base, again = (
        llm.generate([PROMPT], params, adapter=name)[0].prompt_logprobs
        for name in ("rank-8", None, "rank-8")
    )

    assert first == again != base
    llm.close()


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_hold_their_shares(
    trained: Trained, tmp_path: Path, tp_size: int, pp_size: int
) -> None:
    ends = train(trained.base, tmp_path, ENDS)
    folders = trained.folders | ends.folders
    parallel = {"tp_size": tp_size, "pp_size": pp_size}

    answers = run(trained, folders, [*folders, None], num_slots=3, parallel=parallel)

    assert answers == [*expected(trained, [*ADAPTERS]), *expected(ends, ["ends", None])]


def run(
    trained: Trained,
    folders: dict[str, Path],
    names: list[str | None],
    *,
    num_slots: int,
    **options: Any,
) -> list[list[int]]:
    """Let one engine answer the prompt by each adapter, checking its state after each step."""
    adapting = pooling(folders, num_slots=num_slots)
    lora_ids = [0 if name is None else adapting.lora_ids[name] for name in names]
    return run_engine(trained.base, adapting, lora_ids, PROMPT, NUM_TOKENS, **options)


def test_numbers_that_overflow_end_their_request_and_touch_no_other(
    trained: Trained, tmp_path: Path
) -> None:
    """Nor do those find any of it that come after it, to the same pages of the cache."""
    shutil.copytree(trained.folders["rank-8"], tmp_path / "huge")
    file = tmp_path / "huge" / WEIGHTS
    save_file({name: tensor * 1e30 for name, tensor in load_file(file).items()}, file)
    folders = trained.folders | {"huge": tmp_path / "huge"}
    names: list[str | None] = [None, "huge", "rank-8", "huge", *ADAPTERS, None, "huge", *ADAPTERS]

    answers = run(trained, folders, names, num_slots=8, kv_tokens=256, page_size=16)

    assert answers == [[] if name == "huge" else trained.expected[name] for name in names]


def test_adapters_come_and_go_between_calls(trained: Trained, tmp_path: Path) -> None:
    other = train(trained.base, tmp_path, {"rank-8": ADAPTERS["rank-16"]})
    adapting = pooling(num_slots=2, max_rank=64)
    llm = LLM(str(trained.base), adapting=adapting, dtype="float32", show_progress=False)

    def ids(name: str | None) -> list[int]:
        return llm.generate([PROMPT], greedy(), adapter=name)[0].token_ids

    for name in ADAPTERS:
        llm.load_adapter(name, trained.folders[name])
    for asked in (*ADAPTERS, None):
        assert ids(asked) == trained.expected[asked]
    llm.load_adapter("rank-8", other.folders["rank-8"])  # under a name that is taken
    assert ids("rank-8") == other.expected["rank-8"]
    llm.unload_adapter("rank-8")
    with pytest.raises(RequestError, match="'rank-8'"):
        ids("rank-8")
    llm.load_adapter("rank-8", trained.folders["rank-8"])
    assert ids("rank-8") == trained.expected["rank-8"]
    assert ids("rank-64") == trained.expected["rank-64"]
    llm.close()


def test_an_adapter_that_cannot_be_loaded_changes_nothing(trained: Trained, tmp_path: Path) -> None:
    make_adapter(trained.base, tmp_path, target_modules=["q_proj"], r=70)
    llm = make_llm(trained)

    with pytest.raises(RequestError, match=r"'rank-5' is not loaded; loaded are: rank-1"):
        llm.generate([PROMPT], adapter="rank-5")
    with pytest.raises(InvalidAdapter, match="its rank is 70"):
        llm.load_adapter("rank-4", tmp_path)
    with pytest.raises(InvalidAdapter, match="nowhere is not there"):
        llm.load_adapter("rank-4", tmp_path / "nowhere")

    answer = llm.generate([PROMPT], greedy(), adapter="rank-4")[0]
    assert answer.token_ids == trained.expected["rank-4"]
    llm.close()


def test_a_model_without_room_loads_no_adapter(trained: Trained) -> None:
    llm = LLM(str(trained.base), show_progress=False, kv_tokens=512)

    with pytest.raises(ConfigError, match="no adapter slots"):
        llm.load_adapter("a", trained.folders["rank-4"])
    llm.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "DoRA"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj"], "r": 9}, r"its rank is 9, .* lora\.max_lora_rank to 9"),
    ],
    ids=["dora", "whole tensors", "rank"],
)
def test_what_cannot_lie_beside_the_weights_ends_the_start(
    trained: Trained, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    make_adapter(trained.base, tmp_path, **settings)
    folders = {"a": trained.folders["rank-4"], "b": tmp_path}

    with pytest.raises(ConfigError, match=message):
        LLM(str(trained.base), adapting=pooling(folders, max_rank=8), show_progress=False)


def configured_llm(trained: Trained, **lora: Any) -> LLM:
    """Return an engine into which the adapters rank-4 (of v_proj) and rank-8 were loaded."""
    args = {"model": {"path": str(trained.base)}, "lora": {"dynamic": True, **lora}}
    adapting = configured(parse_args(args).lora)
    options: dict[str, Any] = {"dtype": "float32", "kv_tokens": 2048, "num_threads": 1}
    llm = LLM(str(trained.base), adapting=adapting, show_progress=False, **options)
    for name in ("rank-4", "rank-8"):
        llm.load_adapter(name, trained.folders[name])
    return llm


@pytest.mark.observes("lora.max_loras_per_batch")
def test_steps_hold_as_many_adapters_as_is_written(trained: Trained) -> None:
    names = ["rank-4", "rank-8"]
    steps = []
    for num_slots in (1, 2):
        llm = configured_llm(trained, max_loras_per_batch=num_slots)
        answers = llm.generate([PROMPT] * 2, greedy(), adapter=names)
        assert [answer.token_ids for answer in answers] == expected(trained, [*names])
        steps.append(llm.stats().steps_total)
        llm.close()

    assert steps[1] < NUM_TOKENS + 5
    assert steps[0] >= 2 * NUM_TOKENS


@pytest.mark.observes("lora.max_lora_rank", "lora.target_modules")
@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"max_lora_rank": 7}, r"its rank is 8, .* lora\.max_lora_rank to 8"),
        ({"target_modules": ["v_proj"]}, r"slots hold changes of v_proj only"),
    ],
    ids=["rank", "targets"],
)
def test_adapters_without_room_are_refused(
    trained: Trained, lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidAdapter, match=message):
        configured_llm(trained, **lora)


def test_targets_that_the_model_does_not_have_are_refused_by_name(trained: Trained) -> None:
    adapting = pooling(targets=["q_proj", "c_attn", "wo"])

    with pytest.raises(ConfigError, match=r"target_modules names c_attn, wo"):
        LLM(str(trained.base), adapting=adapting, show_progress=False)
