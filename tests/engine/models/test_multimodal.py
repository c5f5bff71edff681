"""The text of models that also see images, against transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError
from remora.engine.models.architectures import parse_config
from tests.engine.loaded import load
from tests.engine.models.families import COMMON
from tests.engine.models.paged_model import PagedModel
from tests.tiny_models import VOCAB_SIZE

TEXT = {**COMMON, "head_dim": 16}
EYES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN = {
    **COMMON,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
}
SEEING = {"depth": 1, "num_heads": 2, "intermediate_size": 8, "patch_size": 14}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**TEXT, "model_type": "gemma3_text", "sliding_window": 24},
            "vision_config": {**EYES, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral-small": (
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**EYES, "model_type": "pixtral", "head_dim": 4},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2-vl": ("Qwen2VL", {"text_config": QWEN, "vision_config": {**SEEING, "embed_dim": 8}}),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "text_config": QWEN,
            "vision_config": {**SEEING, "hidden_size": 8, "out_hidden_size": 64},
        },
    ),
    "ministral3": (
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "ministral3"},
            "vision_config": {**EYES, "model_type": "pixtral", "head_dim": 4},
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    name, settings = CASES[request.param]
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    folder = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(folder)
    return folder, model


@torch.inference_mode()
def assert_as_transformers(folder: Path, oracle: Any) -> None:
    ids = torch.arange(40) * 7 % VOCAB_SIZE

    logits = PagedModel(load(folder)).step(a=ids.tolist())["a"]

    expected = oracle(input_ids=ids.unsqueeze(0)).logits[0]
    assert expected.std() > 0.01
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


def test_the_text_of_a_model_that_sees_is_as_transformers_computes_it(
    checkpoint: tuple[Path, Any],
) -> None:
    assert_as_transformers(*checkpoint)


def test_names_as_transformers_5_keeps_them_are_understood_too(
    checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, oracle = checkpoint
    tensors = {name: t.contiguous() for name, t in oracle.state_dict().items()}
    if oracle.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    assert tensors.keys() != load_file(folder / "model.safetensors").keys()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())

    assert_as_transformers(tmp_path, oracle)


def test_what_gemma_3_leaves_out_is_as_in_transformers() -> None:
    said = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": said}

    config = parse_config(raw)

    usual = transformers.Gemma3TextConfig(**said)
    assert config.vocab_size == usual.vocab_size
    assert config.max_position == usual.max_position_embeddings
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.windows.count(4096) == 29
    assert config.head.tied


def test_a_text_of_another_kind_is_named() -> None:
    raw = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"model_type": "mistral4"},
    }

    with pytest.raises(ConfigError, match=r"model_type of text_config .* known are mistral, mini"):
        parse_config(raw)
