from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoTokenizer

from remora.configs.errors import ConfigError
from remora.engine.models.checkpoint import read_config
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import load_model
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.weights.gguf.names import our_names
from remora.engine.weights.gguf.pre_tokenizers import PRE_TOKENIZERS
from remora.engine.weights.gguf.tokenizer import load_gguf_tokenizer
from remora.engine.weights.gguf.weights import GGUFWeights
from tests.conftest import TinyCheckpoints
from tests.engine.models.paged_model import PagedModel
from tests.engine.weights.gguf.tiny_gguf import make_gguf
from tests.tiny_models import CORPUS

IDS = list(range(3, 43))
WIDE = {"hidden_size": 192, "intermediate_size": 128, "num_attention_heads": 6}


def logits_of(path: Path) -> torch.Tensor:
    model = load_model(
        path, dtype=torch.float32, load_format="auto", device="cpu", show_progress=False
    )
    return PagedModel(model).step(a=IDS)["a"]


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


@pytest.mark.parametrize(
    ("quantisation", "error"),
    [
        (gguf.GGMLQuantizationType.BF16, 0.004),
        (gguf.GGMLQuantizationType.F16, 0.0005),
        (gguf.GGMLQuantizationType.Q8_0, 0.01),
        (gguf.GGMLQuantizationType.Q4_1, 0.1),
    ],
)
def test_quantised_tensors_come_out_near_what_went_in(
    quantisation: gguf.GGMLQuantizationType,
    error: float,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
) -> None:
    checkpoint = tiny_checkpoints("llama", **WIDE)
    exact = read_all(make_gguf(checkpoint, tmp_path / "exact.gguf"))

    file = make_gguf(checkpoint, tmp_path / "small.gguf", quantisation=quantisation)

    for name, tensor in read_all(file).items():
        # A block of 32 normal values reaches about 2.5 standard deviations.
        assert (tensor - exact[name]).abs().mean() <= error * 2.5 * exact[name].std(), name


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


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model at all, but long enough to be one" * 10)

    with pytest.raises(ConfigError, match=r"model\.gguf cannot be read as GGUF"):
        read_config(file)


def test_an_unknown_gguf_architecture_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

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


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["x", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["x", "123", "45"]),
        ("qwen2", ["x", "1", "2", "3", "4", "5"]),
        ("gpt-2", ["x", "12345"]),
        ("starcoder", ["x", "1", "2", "3", "4", "5"]),
        ("tekken", ["x", "1", "2", "3", "4", "5"]),
        ("gpt-4o", ["x", "123", "45"]),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_are_cut(
    pre: str, pieces: list[str], tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf", pre=pre)

    pre_tokenizer = load_gguf_tokenizer(file).backend_tokenizer.pre_tokenizer

    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str("x12345")] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-llm", ["don", "'", "t", "Ġw", "Ã¶", "rld", "Ġ", "1", "2", "Ċ", "ä¸Ń", "x"]),
        ("deepseek-coder", ["don", "'", "t", "ĠwÃ¶rld", "Ġ", "1", "2", "Ċ", "ä¸Ń", "x"]),
        ("deepseek-v3", ["don", "'t", "ĠwÃ¶rld", "Ġ", "12", "Ċ", "ä¸Ń", "x"]),
        ("falcon", ["don", "'", "t", "ĠwÃ¶rld", "Ġ", "12", "Ċ", "ä¸Ńx"]),
        ("mpt", ["don", "'t", "ĠwÃ¶rld", "Ġ12", "Ċ", "ä¸Ńx"]),
    ],
)
def test_pre_tokenizers_cut_in_steps(pre: str, pieces: list[str]) -> None:
    cut = PRE_TOKENIZERS[pre]()

    assert [piece for piece, _ in cut.pre_tokenize_str("don't wörld 12\n中x")] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("tekken", ["camel", "Case", "'s", "ĠXYz", "/Ċ"]),
        ("gpt-4o", ["camel", "Case's", "ĠXYz", "/Ċ"]),
        ("qwen2", ["camelCase", "'s", "ĠXYz", "/Ċ"]),
    ],
)
def test_some_pre_tokenizers_cut_before_capitals(
    pre: str, pieces: list[str], tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf", pre=pre)

    pre_tokenizer = load_gguf_tokenizer(file).backend_tokenizer.pre_tokenizer

    found = [piece for piece, _ in pre_tokenizer.pre_tokenize_str("camelCase's XYz/\n")]
    assert found == pieces


def test_the_file_says_where_texts_begin_and_what_ends_an_output(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints("llama")
    plain = Tokenizer.load(make_gguf(checkpoint, tmp_path / "plain.gguf"))
    said = {"add_bos_token": True, "add_eos_token": True, "eot_token_id": 7}
    file = make_gguf(checkpoint, tmp_path / "model.gguf", token_metadata=said)

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


def test_an_unknown_pre_tokenizer_is_refused(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf", pre="some-bpe")

    with pytest.raises(ConfigError, match="pre-tokenizer 'some-bpe'; known are gpt-2, olmo"):
        load_gguf_tokenizer(file)


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(
    tmp_path: Path,
) -> None:
    pieces = {"▁": -1.0, "h": -2.0, "e": -3.0, "l": -4.0, "o": -5.0, "he": -6.0, "ll": -7.0}
    pieces |= {"hell": -8.0, "▁hell": -9.0, "▁hello": -10.0, "lo": -11.0}
    special, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *byte_tokens, *pieces])
    writer.add_token_scores([0.0] * (3 + 256) + list(pieces.values()))
    kinds = gguf.TokenType
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
        + [kinds.BYTE] * 256
        + [kinds.NORMAL] * len(pieces)
    )
    writer.add_unk_token_id(0)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    tokenizer = load_gguf_tokenizer(file).backend_tokenizer

    tokens = tokenizer.encode("hello oü</s>").tokens
    assert tokens == ["▁hello", "▁", "o", "<0xC3>", "<0xBC>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hello oü").ids) == "hello oü"
