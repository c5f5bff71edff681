"""Adapters of families that name and fuse their modules in ways of their own, against PEFT.

A family that transformers has no class for is another one in its words (`models/families.py`):
there the factors of an adapter are spelt as its weights are, and added to the other's weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from remora.configs.errors import InvalidAdapter
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.engine.models.checkpoint import read_config
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import load_model, open_weights
from remora.engine.protocols import WeightEdit
from remora.engine.weights.rename_tensors import RenamingRules
from remora.lora.adapter import read_needs
from remora.lora.cpu_pool import CpuAdapterPool
from remora.lora.merge import merging
from remora.lora.setup import pooling
from tests.engine.models.families import CASES, make_family
from tests.engine.models.paged_model import PagedModel
from tests.engine.weights.gguf.converter import convert
from tests.engine.weights.gguf.kinds import KINDS
from tests.engine.weights.gguf.test_families import make_checkpoint
from tests.lora.adapters import adapt, run_engine
from tests.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

TOLERANCE = 2e-4  # as of the families without adapters
BY_PEFT = {
    "gpt2": ["c_attn", "c_proj", "c_fc", "wte", "lm_head"],
    "gpt-neox": ["query_key_value", "dense", "dense_h_to_4h", "embed_in", "embed_out"],
    "falcon-7b": ["query_key_value", "dense", "dense_4h_to_h", "lm_head"],
    "falcon-40b": "all-linear",
    "falcon-1b-alibi": "all-linear",
    "starcoder2": ["q_proj", "o_proj", "c_fc", "c_proj"],
    "phi": ["q_proj", "dense", "fc1", "fc2", "lm_head"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "glm4": "all-linear",
    "stablelm-parallel": "all-linear",
    "cohere": "all-linear",
}
BY_SPELLING = ("internlm2", "chatglm", "baichuan-7b", "gpt2-bare")
RANK, SCALE = 3, 2.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_ids(seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (30,), generator=generator).tolist()


@torch.inference_mode()
def oracle_logits(oracle: Any, ids: list[int]) -> Tensor:
    logits: Tensor = oracle(torch.tensor([ids])).logits[0]
    return logits


def load(path: Path, edit: WeightEdit | None = None) -> Any:
    return load_model(
        path,
        dtype=torch.float32,
        load_format="auto",
        device="cpu",
        show_progress=False,
        edit=edit,
    )


def make_pool(path: Path, folders: list[Path]) -> tuple[PagedModel, CpuAdapterPool]:
    """Load a model with as many slots as there are adapters, and what fills them."""
    model = load(path)
    needs = [read_needs(folder) for folder in folders]
    asked = LoRASlotConfig(
        num_slots=len(folders),
        max_rank=max(need.max_rank for need in needs),
        targets=tuple(target for need in needs for target in need.targets),
    )
    room = asked.with_remora_names(read_model_facts(path).module_words)
    places = model.allocate_slots(room)
    rules = RenamingRules(model.config.rules)
    return PagedModel(model), CpuAdapterPool(room, {**places}, open_weights(path, "auto"), rules)


def assert_mixed(path: Path, folders: list[Path], oracles: list[Any]) -> None:
    """Compare a batch whose sequences have one adapter each, or none, with an oracle of each."""
    paged, pool = make_pool(path, folders)
    names = ["base", *(f"adapter{number}" for number in range(len(folders)))]
    for slot, folder in enumerate(folders, 1):
        pool.prepare(slot, folder)
        pool.install(slot, slot)
        paged.adapters[names[slot]] = slot
    vocab_size = paged.model.vocab_size
    prompts = {name: make_ids(number, vocab_size) for number, name in enumerate(names)}

    first = paged.step(**{name: ids[:-1] for name, ids in prompts.items()})
    last = paged.step(**{name: ids[-1:] for name, ids in prompts.items()})

    seen = []
    for name, oracle in zip(names, oracles, strict=True):
        expected = oracle_logits(oracle, prompts[name])
        made = torch.cat([first[name], last[name]])
        torch.testing.assert_close(made, expected, atol=TOLERANCE, rtol=TOLERANCE)
        seen.append(oracle_logits(oracle, prompts["base"]))
    for other in seen[1:]:
        assert (other - seen[0]).abs().max() > 100 * TOLERANCE  # or nothing is proved


def assert_merged(path: Path, folder: Path, oracle: Any) -> None:
    ids = make_ids(0)
    made = PagedModel(load(path, merging(folder))).step(a=ids)["a"]
    torch.testing.assert_close(made, oracle_logits(oracle, ids), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", BY_PEFT)
def test_adapters_of_peft_change_the_logits_as_there(family: str, tmp_path: Path) -> None:
    path, base = make_family(tmp_path / "model", family)
    targets = BY_PEFT[family]
    ends = {"wte", "embed_in", "embed_out", "lm_head"}
    inner = targets if isinstance(targets, str) else [each for each in targets if each not in ends]
    settings: list[dict[str, Any]] = [
        {"r": 4, "target_modules": targets},
        {"r": 2, "lora_alpha": 3, "target_modules": inner, "use_rslora": True},
    ]
    folders = [tmp_path / str(number) for number in range(3)]
    oracles = [
        adapt(copy.deepcopy(base), folder, seed=number, **of_adapter)
        for number, (folder, of_adapter) in enumerate(zip(folders, settings, strict=False))
    ]

    assert_mixed(path, folders[:2], [base, *oracles])
    assert_merged(path, folders[1], oracles[1])
    dora: dict[str, Any] = {"r": 4, "target_modules": inner, "use_dora": True}
    assert_merged(path, folders[2], adapt(copy.deepcopy(base), folders[2], **dora))


def spell(path: Path, family: str, base: Any, seed: int) -> Any:
    """Write an adapter in a family's words; return the model it is of, with it added.

    All weights of a layer that read as many inputs have one A, as those have that are fused.
    """
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(base)
    is_conv, factors, shared = family.startswith("gpt2"), dict[str, Tensor](), dict[int, Tensor]()
    for name, weight in model.state_dict().items():
        if weight.dim() != 2 or not any(word in name for word in (".layers.", ".h.")):
            continue
        outputs, inputs = weight.T.shape if is_conv else weight.shape
        a = shared.setdefault(inputs, torch.randn(RANK, inputs, generator=generator) * 0.1)
        factors[name] = torch.randn(outputs, RANK, generator=generator) * 0.1
        update = SCALE * factors[name] @ a
        weight += update.T if is_conv else update
    raw = json.loads(base.config.to_json_string(use_diff=False))
    weights, _ = CASES[family].respell(base.state_dict(), {**raw})
    spelt, _ = CASES[family].respell(factors, raw)
    tensors = {}
    for name in spelt.keys() - {"h.0.attn.bias"}:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        inputs = weights[name].shape[0 if is_conv else 1]
        tensors[f"{module}.lora_A.weight"] = shared[inputs].clone()
        tensors[f"{module}.lora_B.weight"] = spelt[name].contiguous()
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, "fan_in_fan_out": is_conv}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("family", BY_SPELLING)
def test_adapters_in_the_words_of_other_code_are_taken_apart(family: str, tmp_path: Path) -> None:
    path, base = make_family(tmp_path / "model", family)
    folders = [tmp_path / "a", tmp_path / "b"]
    oracles = [spell(folder, family, base, seed) for seed, folder in enumerate(folders)]

    assert_mixed(path, folders, [base, *oracles])
    assert_merged(path, folders[0], oracles[0])


def test_adapters_of_a_model_fit_its_gguf_file(tmp_path: Path) -> None:
    kind = KINDS["gpt2"]
    make_checkpoint(kind, tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    file = convert(kind, tmp_path / "model", tmp_path / "model.gguf")
    oracle = adapt(copy.deepcopy(base), tmp_path / "a", r=4, target_modules="all-linear")

    assert_mixed(file, [tmp_path / "a"], [base, oracle])


@pytest.mark.parametrize("family", ["gpt2", "falcon-40b"])
def test_two_ranks_serve_them_as_one_does(family: str, tmp_path: Path) -> None:
    path, base = make_family(tmp_path / "model", family)
    make_tiny_tokenizer().save_pretrained(path)
    adapt(copy.deepcopy(base), tmp_path / "a", r=4, target_modules="all-linear")
    adapt(copy.deepcopy(base), tmp_path / "b", r=2, target_modules="all-linear", seed=1)

    adapting = pooling({name: tmp_path / name for name in "ab"})

    alone, together = (
        run_engine(path, adapting, range(3), make_ids(0), 8, parallel=parallel)
        for parallel in (None, {"tp_size": 2})
    )

    assert together == alone
    assert len({tuple(ids) for ids in alone}) == len(alone)


def test_learned_positions_have_no_place_beside_the_weights(tmp_path: Path) -> None:
    path, base = make_family(tmp_path / "model", "gpt2")
    adapt(base, tmp_path / "a", r=2, target_modules=["c_fc", "wpe"])
    _, pool = make_pool(path, [tmp_path / "a"])

    with pytest.raises(InvalidAdapter, match=r"embed_positions\.weight"):
        pool.prepare(1, tmp_path / "a")


def test_words_of_a_checkpoint_stand_for_ours(tmp_path: Path) -> None:
    path, _ = make_family(tmp_path, "gpt2")
    asked = LoRASlotConfig(num_slots=1, max_rank=2, targets=("c_attn", "c_proj", "v_proj", "wte"))

    made = asked.with_remora_names(read_model_facts(path).module_words)

    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "embed_tokens")
    assert made.targets == tuple(sorted(parts))
    assert asked.with_remora_names({}).targets == tuple(sorted(asked.targets))


def test_a_head_of_unit_rows_is_not_updated(tmp_path: Path) -> None:
    path, _ = make_family(tmp_path / "model", "baichuan-7b", vocab_size=125_696, hidden_size=8)
    rules = RenamingRules(read_config(path).rules)

    assert rules.bars_updates("lm_head.weight") == "its rows are brought to length 1 as they load"
    assert rules.bars_updates("model.layers.0.self_attn.W_pack.weight") == ""
