from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoTokenizer

from remora.configs.errors import ConfigError
from remora.engine.models.checkpoint import read_config
from remora.engine.models.facts import read_model_facts
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.weights.gguf.names import our_names
from remora.engine.weights.gguf.pre_tokenizers import PRE_TOKENIZERS
from remora.engine.weights.gguf.tokenizer import load_gguf_tokenizer
from remora.engine.weights.gguf.weights import GGUFWeights
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load
from tests.engine.models.paged_model import PagedModel
from tests.engine.weights.gguf.converter import writing
from tests.engine.weights.gguf.tiny_gguf import make_gguf
from tests.tiny_models import CORPUS

IDS = list(range(3, 43))
WIDE = {"hidden_size": 192, "intermediate_size": 128, "num_attention_heads": 6}


def logits_of(path: Path) -> torch.Tensor:
    return PagedModel(load(path)).step(a=IDS)["a"]


def read_all(file: Path) -> dict[str, torch.Tensor]:
    source = GGUFWeights(file)
    return dict(source.read(source.shapes().keys()))


@pytest.mark.parametrize("family", ["llama", "qwen2.5-tied", "qwen3"])
def test_a_gguf_file_gives_the_logits_of_the_checkpoint_it_was_made_of(
    family: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints(family)

    file = make_gguf(checkpoint, tmp_path / "model.gguf")

    assert read_config(file).architecture == read_config(checkpoint).architecture
    assert torch.equal(logits_of(file), logits_of(checkpoint))


def test_quantised_tensors_come_out_near_what_went_in(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints("llama", **WIDE)
    exact = read_all(make_gguf(checkpoint, tmp_path / "exact.gguf"))

    file = make_gguf(checkpoint, tmp_path / "small.gguf", stored_as=gguf.GGMLQuantizationType.Q8_0)

    for name, tensor in read_all(file).items():
        # A block of 32 normal values reaches about 2.5 standard deviations.
        assert (tensor - exact[name]).abs().mean() <= 0.01 * 2.5 * exact[name].std(), name


def test_metadata_becomes_the_config_that_transformers_would_have(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints("llama")

    file = make_gguf(checkpoint, tmp_path / "model.gguf")

    assert read_config(file) == read_config(checkpoint)
    assert read_model_facts(file).num_parameters == read_model_facts(checkpoint).num_parameters
    assert read_model_facts(file).dtype == "bfloat16"


def test_rope_scaling_is_read_from_metadata(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }

    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf", metadata=metadata)

    rope = read_config(file).layers[0].rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 128)


def test_llama3_rope_comes_as_a_tensor_of_divisors(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    divisors = [1.0] * 4 + [8.0] * 4

    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf", divisors=divisors)

    assert read_config(file).layers[0].rope.divisors == tuple(divisors)
    assert logits_of(file).isfinite().all()


def test_unknown_tensor_names_stay_as_they_are() -> None:
    assert our_names("blk.7.attn_q.bias", {}) == ("model.layers.7.self_attn.q_proj.bias",)
    assert our_names("blk.7.ssm_in.weight", {}) == ("blk.7.ssm_in.weight",)


def test_an_unknown_gguf_architecture_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with writing(file, "mamba"):
        pass

    with pytest.raises(ConfigError, match="'mamba'; known are llama, mistral3, qwen2"):
        read_config(file)


def test_the_tokenizer_in_the_file_cuts_text_like_the_original(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints("llama")
    original = AutoTokenizer.from_pretrained(checkpoint)

    tokenizer = load_gguf_tokenizer(make_gguf(checkpoint, tmp_path / "model.gguf"))

    for text in (*CORPUS, "<|im_start|>user\n<|im_end|>", "  a\n\n b1234 5'll"):
        ids = tokenizer.backend_tokenizer.encode(text).ids
        assert ids == original.encode(text)
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.eos_token_id == 2
    assert tokenizer.chat_template == original.chat_template


DIGITS, WORDS, CAPITALS = "x12345", "don't wörld 12\n中x", "camelCase's XYz/\n"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", DIGITS, ["x", "1", "2", "3", "4", "5"]),
        ("llama-bpe", DIGITS, ["x", "123", "45"]),
        ("qwen2", DIGITS, ["x", "1", "2", "3", "4", "5"]),
        ("gpt-2", DIGITS, ["x", "12345"]),
        ("starcoder", DIGITS, ["x", "1", "2", "3", "4", "5"]),
        ("tekken", DIGITS, ["x", "1", "2", "3", "4", "5"]),
        ("gpt-4o", DIGITS, ["x", "123", "45"]),
        (
            "deepseek-llm",
            WORDS,
            ["don", "'", "t", "Ġw", "Ã¶", "rld", "Ġ", "1", "2", "Ċ", "ä¸Ń", "x"],
        ),
        ("deepseek-coder", WORDS, ["don", "'", "t", "ĠwÃ¶rld", "Ġ", "1", "2", "Ċ", "ä¸Ń", "x"]),
        ("deepseek-v3", WORDS, ["don", "'t", "ĠwÃ¶rld", "Ġ", "12", "Ċ", "ä¸Ń", "x"]),
        ("falcon", WORDS, ["don", "'", "t", "ĠwÃ¶rld", "Ġ", "12", "Ċ", "ä¸Ńx"]),
        ("mpt", WORDS, ["don", "'t", "ĠwÃ¶rld", "Ġ12", "Ċ", "ä¸Ńx"]),
        ("tekken", CAPITALS, ["camel", "Case", "'s", "ĠXYz", "/Ċ"]),
        ("gpt-4o", CAPITALS, ["camel", "Case's", "ĠXYz", "/Ċ"]),
        ("qwen2", CAPITALS, ["camelCase", "'s", "ĠXYz", "/Ċ"]),
    ],
)
def test_pre_tokenizers_cut_digits_words_and_capitals(
    pre: str, text: str, pieces: list[str]
) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str(text)] == pieces


def test_the_file_says_where_texts_begin_and_what_ends_an_output(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints("llama")
    plain = Tokenizer.load(make_gguf(checkpoint, tmp_path / "plain.gguf"))
    said = {"add_bos_token": True, "add_eos_token": True, "eot_token_id": 7}
    said = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    file = make_gguf(checkpoint, tmp_path / "model.gguf", general=said)

    tokenizer = Tokenizer.load(file)

    ids = plain.encode("Hello", add_special_tokens=True)
    assert ids[0] != 1
    assert tokenizer.encode("Hello", add_special_tokens=True) == [1, *ids, 2]
    assert tokenizer.encode("Hello", add_special_tokens=False) == ids
    assert (plain.eos_token_ids, tokenizer.eos_token_ids) == ((2,), (2, 7))


def test_templates_in_the_file_are_known_by_name(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    said = {"tokenizer.chat_template.tool_use": "with tools"}
    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf", general=said)
    folder = tmp_path / "saved"
    folder.mkdir()

    tokenizer = load_gguf_tokenizer(file)
    tokenizer.save(folder)

    assert isinstance(tokenizer.chat_template, dict)
    assert tokenizer.chat_template["tool_use"] == "with tools"
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


def test_a_model_may_lie_in_several_files(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints("llama")
    whole = make_gguf(checkpoint, tmp_path / "whole.gguf")
    first = make_gguf(checkpoint, tmp_path / "model.gguf", max_tensors=10)
    assert first.name == "model-00001-of-00003.gguf"

    assert torch.equal(logits_of(first), logits_of(whole))
    with pytest.raises(ConfigError, match=r"part 2 of 3: give the path of model-00001-of-00003"):
        read_config(tmp_path / "model-00002-of-00003.gguf")
    (tmp_path / "model-00003-of-00003.gguf").unlink()
    with pytest.raises(ConfigError, match=r"1 of the 3 parts of .* model-00003-of-00003\.gguf"):
        read_config(first)


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(
    tmp_path: Path,
) -> None:
    pieces = {"▁": -1.0, "h": -2.0, "e": -3.0, "l": -4.0, "o": -5.0, "he": -6.0, "ll": -7.0}
    pieces |= {"hell": -8.0, "▁hell": -9.0, "▁hello": -10.0, "lo": -11.0}
    special, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    file = tmp_path / "model.gguf"
    unknown, control = gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL
    kinds = [unknown, control, control, *[gguf.TokenType.BYTE] * 256]
    with writing(file, "llama") as writer:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*special, *byte_tokens, *pieces])
        writer.add_token_scores([0.0] * (3 + 256) + list(pieces.values()))
        writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * len(pieces)])
        writer.add_unk_token_id(0)
        writer.add_eos_token_id(2)

    tokenizer = load_gguf_tokenizer(file).backend_tokenizer

    tokens = tokenizer.encode("hello oü</s>").tokens
    assert tokens == ["▁hello", "▁", "o", "<0xC3>", "<0xBC>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hello oü").ids) == "hello oü"


def test_blocks_that_are_a_kind_are_taken_as_stored(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)

    def draw(
        data: npt.NDArray[np.float32], of_type: gguf.GGMLQuantizationType
    ) -> npt.NDArray[np.uint8]:  # the library does not write K-quants
        blocks = random.integers(0, 256, (len(data), data.shape[1] // 256, 144), np.uint8)
        blocks[..., :4] = np.array([1e-3, 2e-3], np.float16).view(np.uint8)
        return blocks.reshape(len(data), -1)

    path = tiny_checkpoints(
        "llama",
        hidden_size=256,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
    )
    q4_k = gguf.GGMLQuantizationType.Q4_K
    source = GGUFWeights(make_gguf(path, tmp_path / "model.gguf", stored_as=q4_k, encode=draw))
    plain = dict(source.read(source.shapes().keys()))

    kinds = dict(source.kinds(source.quantised().keys()))

    assert "model.layers.0.self_attn.k_proj.weight" in kinds
    assert "model.norm.weight" not in kinds
    for name, kind in kinds.items():
        torch.testing.assert_close(kind.dequantised(), plain[name])
