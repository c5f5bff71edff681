"""Which files of a repository are needed: those of real repositories, and any others."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.engine.sources.faults import SourceFault
from remora.engine.sources.model_files import gguf_files, only_gguf, small_files, weight_files

LLAMA = [
    *(".gitattributes", "LICENSE", "README.md", "USE_POLICY.md", "config.json"),
    *("generation_config.json", "model-00001-of-00002.safetensors"),
    *("model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    *("original/consolidated.00.pth", "original/params.json", "original/tokenizer.model"),
    *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
]
MISTRAL = ["config.json", "consolidated.safetensors", "model.safetensors", "tokenizer.model.v3"]
MINILM = [
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    *("2_Dense/pytorch_model.bin", "config.json", "model.safetensors", "modules.json"),
    *("onnx/model.onnx", "openvino/openvino_model.xml", "pytorch_model.bin", "rust_model.ot"),
    *("sentence_bert_config.json", "tf_model.h5", "train_script.py", "vocab.txt"),
]


def weights_of(names: list[str], kind: str = "safetensors") -> list[str]:
    shards = [name for name in names if "-of-" in name]
    index = json.dumps({"weight_map": {name: name for name in shards}}).encode()
    return weight_files(names, lambda name: index, kind, "me/repo")  # type: ignore[arg-type]


def test_copies_in_other_formats_are_left() -> None:
    assert weights_of(LLAMA) == LLAMA[6:8]
    assert weights_of(MISTRAL) == ["model.safetensors"]
    assert weights_of(MINILM) == ["model.safetensors"]
    assert weights_of(MINILM, "pickles") == ["pytorch_model.bin"]
    assert weights_of(MINILM, "none") == []
    assert small_files(LLAMA) == sorted([LLAMA[1], *LLAMA[3:6], LLAMA[8], *LLAMA[12:]])


def test_modules_of_sentence_transformers_come_with_the_small_files() -> None:
    modules = [name for name in small_files(MINILM) if "/" in name]

    assert modules == ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["config.json", "pytorch_model.bin"], "load_format: pt"),
        (["config.json", "a.gguf"], "name one of them, as me/repo:a.gguf"),
        (["config.json", "tf_model.h5"], "holds no weights that are read here"),
        ([], "It has no files"),
        (["model.safetensors.index.json", "x-00001-of-00002"], "x-00001"),
    ],
)
def test_a_repository_without_weights_says_what_it_has(names: list[str], reason: str) -> None:
    if reason == "x-00001":
        names, index = names[:1], b'{"weight_map": {"a": "x-00001-of-00002"}}'
        with pytest.raises(SourceFault, match="lacks x-00001-of-00002"):
            weight_files(names, lambda name: index, "safetensors", "me/repo")
        return
    with pytest.raises(SourceFault, match=reason):
        weights_of(names)


def test_an_index_that_is_none_is_a_fault() -> None:
    with pytest.raises(SourceFault, match="is not an index"):
        weight_files(["model.safetensors.index.json"], lambda name: b"[]", "safetensors", "me/repo")


QUANTISATIONS = ["Q4_K_M", "Q4_K_S", "Q4_0", "Q8_0", "IQ4_XS", "BF16", "UD-Q4_K_XL"]


@given(wanted=st.sampled_from(QUANTISATIONS), upper=st.booleans())
def test_a_quantisation_means_one_file(wanted: str, upper: bool) -> None:
    names = [f"Tiny-{name}.gguf" for name in QUANTISATIONS] + ["mmproj-Tiny-BF16.gguf"]
    text = wanted if upper else wanted.lower()

    assert gguf_files(names, text, "me/repo") == [f"Tiny-{wanted}.gguf"]


def test_a_gguf_file_that_is_not_one_is_refused() -> None:
    names = ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"]
    with pytest.raises(SourceFault, match="several GGUF files 'Q4_K_M'"):
        gguf_files(names, "Q4_K_M", "me/repo")
    with pytest.raises(SourceFault, match=r"lacks a-00002-of-00002\.gguf"):
        gguf_files(["a-00001-of-00002.gguf"], "a", "me/repo")
    assert only_gguf(["a.gguf"]) == "a.gguf"
    assert only_gguf(["a.gguf", "config.json"]) is None
