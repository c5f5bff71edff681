"""A merged adapter against PEFT: the same weights, and the same tokens out of the engine."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.engine.llm import LLM, SamplingParams
from remora.engine.protocols import NO_ADAPTERS, Adapting
from remora.engine.weights.safetensors import SafetensorsWeights
from remora.lora.files import WEIGHTS
from remora.lora.merge import merging
from remora.lora.setup import configured
from tests.conftest import TinyCheckpoints
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import SAMPLES
from tests.lora.adapters import ADAPTERS as SHARED
from tests.lora.adapters import ENDS as SHARED_ENDS
from tests.lora.adapters import greedy_ids, make_adapter, run_engine
from tests.lora.peft_files import AS_NAMED

ADAPTERS: dict[str, dict[str, Any]] = SHARED | {
    "DoRA": {"r": 4, "target_modules": "all-linear", "use_dora": True},
    "rank beyond the width": {"r": 128, "target_modules": ["k_proj"]},
}
UNTIED: dict[str, dict[str, Any]] = {
    "head and embedding": SHARED_ENDS,
    "whole tensors": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"],
    },
}
PROMPT = [17, 300, 42, 99, 256, 8, 77]
NUM_TOKENS = 24


def merged_by_peft(adapted: Any) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(adapted.merge_and_unload().state_dict())


@pytest.mark.parametrize("settings", [*ADAPTERS.values(), *UNTIED.values()], ids=str)
def test_merged_weights_are_those_of_peft(
    settings: dict[str, Any], tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    base = tiny_checkpoints("llama")
    expected = merged_by_peft(make_adapter(base, tmp_path, **settings))

    source = merging(tmp_path)(SafetensorsWeights(base), AS_NAMED)

    made = {name: tensor.float().clone() for name, tensor in source.read(source.shapes().keys())}
    assert made.keys() == source.shapes().keys()
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, expected[name], rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2.5-tied", "qwen3"])
@pytest.mark.parametrize("name", ["rank-8", "DoRA"])
def test_the_engine_makes_the_tokens_that_peft_makes(
    family: str, name: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    base = tiny_checkpoints(family)
    adapted = make_adapter(base, tmp_path, **ADAPTERS[name])
    expected = greedy_ids(adapted, PROMPT, NUM_TOKENS)
    with adapted.disable_adapter():
        assert greedy_ids(adapted, PROMPT, NUM_TOKENS) != expected  # or it would prove nothing

    assert generate(base, tmp_path) == expected


def test_ranks_merge_their_shares(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    base = tiny_checkpoints("llama")
    adapted = make_adapter(base, tmp_path, **ADAPTERS["DoRA"])
    adapting = Adapting(edit=merging(tmp_path))
    parallel = {"tp_size": 2, "pp_size": 2}

    (ids,) = run_engine(base, adapting, [0], PROMPT, NUM_TOKENS, parallel=parallel)

    assert ids == greedy_ids(adapted, PROMPT, NUM_TOKENS)


def test_a_merged_model_is_quantised_as_a_whole(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    base = tiny_checkpoints("llama")
    settings = ADAPTERS["rank-8"]
    merged = make_adapter(base, tmp_path / "adapter", **settings).merge_and_unload()
    merged.save_pretrained(str(tmp_path / "merged"))
    for file in base.glob("tokenizer*"):
        (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())

    expected = generate(tmp_path / "merged", None, quantization="int8")
    assert generate(base, tmp_path / "adapter", quantization="int8") == expected


def test_an_adapter_is_merged_into_the_numbers_of_a_quantised_checkpoint(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    base = tiny_checkpoints("llama")
    make_adapter(base, tmp_path / "adapter", **ADAPTERS["rank-8"])
    torch.manual_seed(0)

    quantised, plain = quantise(base, tmp_path, SAMPLES["gptq-act-order"])

    expected = generate(plain, tmp_path / "adapter")
    assert generate(plain, None) != expected
    assert generate(quantised, tmp_path / "adapter") == expected


def generate(base: Path, adapter: Path | None, **options: Any) -> list[int]:
    llm = LLM(
        str(base),
        adapting=NO_ADAPTERS if adapter is None else Adapting(edit=merging(adapter)),
        show_progress=False,
        **({"dtype": "float32", "kv_tokens": 1024, "num_threads": 1} | options),
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return llm.generate(PROMPT, params)[0].token_ids


def test_an_embedding_that_is_the_head_too_is_not_merged(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    base = tiny_checkpoints("llama-bias")
    make_adapter(base, tmp_path, r=4, target_modules=["q_proj", "embed_tokens"])

    with pytest.raises(ConfigError, match="would change both"):
        merging(tmp_path)(SafetensorsWeights(base), AS_NAMED)


def test_an_adapter_of_these_tests_depends_only_on_its_seed(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    for name in ("one", "same"):
        torch.rand(1)  # of the tests that ran before
        make_adapter(tiny_checkpoints("llama"), tmp_path / name, seed=3, **ADAPTERS["rank-1"])

    one, same = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "same"))

    assert all(torch.equal(one[name], same[name]) for name in one)


def test_a_configuration_names_the_adapter(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    base = tiny_checkpoints("llama")
    make_adapter(base, tmp_path, **ADAPTERS["rank-1"])
    adapters = [{"name": "a", "path": str(tmp_path)}]
    config = parse_args({"model": {"path": str(base)}, "lora": {"adapters": adapters}})

    adapting = configured(config.lora)

    assert adapting.edit is not None
    assert tmp_path.name in adapting.edit(SafetensorsWeights(base), AS_NAMED).label
    assert configured(parse_args({"model": {"path": str(base)}}).lora) is NO_ADAPTERS


def test_a_broken_adapter_ends_the_start(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json is not there"):
        LLM(
            str(tiny_checkpoints("llama")),
            adapting=Adapting(edit=merging(tmp_path)),
            show_progress=False,
        )
