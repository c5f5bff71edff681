"""Keys of the section `model`: what an engine makes of each."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remora.configs.errors import ConfigError, InvalidRequest
from remora.configs.load import parse_args
from remora.engine.launch import BuiltEngine, build_engine
from remora.engine.llm import LLM
from remora.engine.parallel.shard import Shard
from remora.engine.tokens import fast_tokenizer
from remora.engine.types import FinishReason, SamplingParams
from remora.engine.weights import mmap as mapping
from remora.engine.weights import safetensors
from remora.engine.weights.files import hash_of
from tests.conftest import TinyCheckpoints
from tests.tiny_models import make_tiny_tokenizer

PROMPT = [17, 300, 42, 99]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "kv_tokens": 512,
    "num_threads": 1,
    "device": "cpu",
    "cpu_kernels": "torch",
}


@pytest.fixture(scope="module")
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint of the test's own."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@contextmanager
def made(path: Path, **model: Any) -> Iterator[LLM]:
    llm = LLM(str(path), show_progress=False, **ENGINE, **model)
    yield llm
    llm.close()


def ids(path: Path, params: SamplingParams = GREEDY, **model: Any) -> list[int]:
    with made(path, **model) as llm:
        return llm.generate([PROMPT], params)[0].token_ids


def built(path: Path, engine: Mapping[str, Any] = ENGINE, **model: Any) -> BuiltEngine:
    sections = {"model": {"path": str(path), **model}, "engine": {**ENGINE, **engine}}
    found = build_engine(parse_args(sections), show_progress=False)
    found.engine.close()
    return found


@pytest.mark.observes("model.dtype")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_have_the_format_that_is_asked_for(llama: Path, dtype: str) -> None:
    whole = built(llama, dtype="float32")
    made = built(llama, dtype=dtype)

    share = {"bfloat16": 2, "float16": 2, "float32": 1}[dtype]
    assert made.plan.dtype == dtype
    assert made.step_weight_bytes * share == whole.step_weight_bytes


@pytest.mark.observes("model.quantization")
def test_weights_are_rounded_to_what_is_asked_for(llama: Path) -> None:
    plain, rounded = (
        built(llama, {"cpu_kernels": "auto"}, dtype="bfloat16", quantization=kind)
        for kind in ("none", "int8")
    )

    assert rounded.step_weight_bytes < 0.7 * plain.step_weight_bytes


@pytest.mark.observes("model.load_format")
def test_dummy_needs_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        built(copy)

    assert len(ids(copy, load_format="dummy")) == GREEDY.max_tokens


@pytest.mark.observes("model.load_format")
def test_pickles_are_read_for_who_asks(copy: Path, llama: Path) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="load_format: pt"):
        built(copy)

    assert ids(copy, load_format="pt", delete_after_load=True) == ids(llama)
    assert not (copy / "pytorch_model.bin").exists()


@pytest.mark.observes("model.verify_checksums")
@pytest.mark.parametrize("note", ["model.safetensors.sha256", "SHA256SUMS", "hub"])
def test_files_are_compared_with_their_checksums(copy: Path, note: str) -> None:
    weights = copy / "model.safetensors"
    with pytest.raises(ConfigError, match=r"no SHA-256 of model\.safetensors is noted"):
        built(copy, verify_checksums=True)
    hub = copy / ".cache/huggingface/download"
    hub.mkdir(parents=True)
    sums = {
        "SHA256SUMS": (copy / note, f"{'0' * 64}  a.json\n{hash_of(weights)} *{weights.name}\n"),
        "hub": (hub / f"{weights.name}.metadata", f"{'1' * 40}\n{hash_of(weights)}\n17.5\n"),
    }
    file, text = sums.get(note, (copy / note, hash_of(weights)))
    file.write_text(text)

    built(copy, verify_checksums=True)
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)

    built(copy)
    with pytest.raises(ConfigError, match=r"model\.safetensors has the SHA-256 \w+; expected"):
        built(copy, verify_checksums=True)


@pytest.mark.observes("model.chat_template")
def test_chats_are_written_by_the_template_that_is_named(copy: Path) -> None:
    message = {"role": "user", "content": "Hi"}
    own = built(copy).tokenizer.render_chat([message])
    more = copy / "additional_chat_templates"
    more.mkdir()
    (more / "brief.jinja").write_text("brief {{ messages[0].content }}{{ eos_token }}")
    file = copy / "other.jinja"
    file.write_text("{% set x = 1 %}file {{ messages[0].content }}")
    (copy / "other.json").write_text(json.dumps({"chat_template": "json"}))
    (copy / "bad.jinja").write_text("{% for")

    def chat(wanted: str | None) -> str:
        return built(copy, chat_template=wanted).tokenizer.render_chat([message])

    assert chat(None) == own
    assert chat("brief") == "brief Hi<|im_end|>"
    assert chat(str(file)) == "file Hi"
    assert chat(str(copy / "other.json")) == "json"
    with pytest.raises(ConfigError, match=r"no such file .*own templates are: brief, default"):
        chat("absent")
    with pytest.raises(ConfigError, match=r"bad\.jinja is malformed"):
        chat(str(copy / "bad.jinja"))


@pytest.mark.observes("model.mmap")
def test_files_are_read_whole_where_they_may_not_be_mapped(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids(llama)

    def refuse(*_args: Any) -> memoryview:
        raise AssertionError("a file was mapped")

    monkeypatch.setattr(safetensors, "map_range", refuse)
    assert ids(llama, mmap=False) == expected
    with pytest.raises(AssertionError, match="mapped"):
        ids(llama)


def test_a_file_that_ends_too_soon_is_told(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    with (tmp_path / "short").open("rb") as file:
        assert bytes(mapping.read_range(file, 1, 2)) == b"bc"
        with pytest.raises(ConfigError, match="ends before byte 4"):
            mapping.read_range(file, 1, 3)


@pytest.mark.observes("model.load_threads")
def test_so_many_threads_fill_the_weights(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(llama)
    seen: set[str] = set()
    first = iter(range(3))
    together = threading.Barrier(3, timeout=10)
    fill = Shard.fill

    def noted(shard: Shard, whole: torch.Tensor) -> None:
        seen.add(threading.current_thread().name)
        if next(first, None) is not None:
            together.wait()
        fill(shard, whole)

    monkeypatch.setattr(Shard, "fill", noted)
    assert ids(llama, load_threads=3) == expected
    assert len(seen) == 3


@pytest.mark.observes("model.delete_after_load")
def test_weight_files_are_gone_once_they_are_loaded(copy: Path, llama: Path) -> None:
    weights = copy / "model.safetensors"
    expected = ids(llama)
    assert ids(copy) == expected
    assert weights.exists()

    assert ids(copy, delete_after_load=True) == expected
    assert not weights.exists()
    assert (copy / "config.json").exists()


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"num_replicas": 2}},
        {"autoscaling": {"max_replicas": 2}},
        {"lora": {"dynamic": True}},
    ],
)
def test_weights_that_are_needed_again_are_not_deleted(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="delete_after_load"):
        parse_args({"model": {"path": "a", "delete_after_load": True}, **sections})


@pytest.mark.observes("model.config_overrides")
def test_entries_of_the_config_can_be_replaced(llama: Path) -> None:
    made = built(llama, config_overrides={"max_position_embeddings": 64})
    assert made.plan.max_model_len == 64

    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    assert ids(llama, config_overrides={"rope_parameters": rope}) != ids(llama)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        built(llama, config_overrides={"num_hidden_layers": 0})


@pytest.mark.observes("model.eos_token_ids")
def test_an_output_ends_at_any_of_the_ends(llama: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    whole = ids(llama)
    second, sixth = whole[1], whole[5]

    with made(llama, eos_token_ids=[second, sixth]) as llm:
        (answer,) = llm.generate([PROMPT], params)
    first_end = min(whole.index(second), whole.index(sixth))
    assert answer.token_ids == whole[: first_end + 1]
    assert answer.finish_reason is FinishReason.STOP
    with pytest.raises(ConfigError, match="below 512"):
        built(llama, eos_token_ids=[512])


@pytest.mark.observes("model.tokenizer_path")
def test_the_tokenizer_may_lie_elsewhere(llama: Path, tmp_path: Path) -> None:
    other = make_tiny_tokenizer()
    other.add_tokens(["capital"])
    other.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    own = built(llama).tokenizer
    elsewhere = built(llama, tokenizer_path=str(tmp_path)).tokenizer
    text = "the capital"
    assert elsewhere.encode(text, add_special_tokens=False)[-1] == 512
    assert own.encode(text, add_special_tokens=False)[-1] < 512
    assert set(own.eos_token_ids) <= set(elsewhere.eos_token_ids)


@pytest.mark.observes("model.tokenizer_loader")
def test_transformers_reads_the_tokenizer_where_it_is_asked_to(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    load = fast_tokenizer._load_by_transformers

    def noted(folder: Path, *, trust_code: bool) -> Any:
        asked.append(folder)
        return load(folder, trust_code=trust_code)

    monkeypatch.setattr(fast_tokenizer, "_load_by_transformers", noted)
    text = "What is the capital of France? Grüße"
    own = built(llama).tokenizer.encode(text, add_special_tokens=True)
    assert asked == []

    theirs = built(llama, tokenizer_loader="transformers").tokenizer
    assert asked == [llama]
    assert theirs.encode(text, add_special_tokens=True) == own


@pytest.mark.observes("model.skip_tokenizer")
def test_without_tokenizer_ids_come_in_and_go_out(copy: Path, llama: Path) -> None:
    for file in copy.glob("token*"):
        file.unlink()

    with made(copy, skip_tokenizer=True) as llm:
        (answer,) = llm.generate([PROMPT], GREEDY)
        assert answer.token_ids == ids(llama)
        assert answer.text == ""
        with pytest.raises(InvalidRequest, match="skip_tokenizer"):
            llm.generate(["a text"], GREEDY)
        with pytest.raises(InvalidRequest, match="skip_tokenizer"):
            llm.chat([{"role": "user", "content": "a"}])
    with pytest.raises(ConfigError):
        built(copy)
