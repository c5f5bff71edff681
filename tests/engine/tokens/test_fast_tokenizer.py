"""tokenizer.json read directly is what transformers makes of the folder, or is left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from remora.configs.errors import ConfigError
from remora.engine.tokens.fast_tokenizer import load_tokenizer, read_fast_tokenizer
from tests.conftest import TinyCheckpoints
from tests.tiny_models import CORPUS, make_tiny_tokenizer

TEXTS = (
    *CORPUS,
    "",
    " ",
    "  a\n\n b1234 5'll . , ! don 't",
    "<|im_start|>user\nHi<|im_end|> <|im_end|>x<|endoftext|>",
    "\ufffd\u2028\u00a0 \U0001f468\u200d\U0001f469 \x00",
)


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    edit(tmp_path / "config.json", model_type="llama")
    return tmp_path


def assert_like_transformers(folder: Path) -> None:
    ours, theirs = read_fast_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    backend = ours.backend_tokenizer
    assert backend.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.chat_template == theirs.chat_template
    assert ours.response_template == theirs.response_template
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert ids == theirs.encode(text)
        bare = backend.encode(text, add_special_tokens=False).ids
        assert bare == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert backend.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_checkpoint_is_read_like_transformers(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    assert_like_transformers(tiny_checkpoints(family))


def test_the_built_in_model_is_read_like_transformers(smollm2_path: Path) -> None:
    assert_like_transformers(smollm2_path)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"response_template": {"fields": {"content": {}}}, "response_schema": {"type": "object"}},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"clean_up_tokenization_spaces": False, "model_max_length": 3, "padding_side": "left"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {}},
        {"unk_token": None},
    ],
)
def test_settings_that_are_understood_mean_what_transformers_takes_them_for(
    settings: dict[str, Any], folder: Path
) -> None:
    edit(folder / "tokenizer_config.json", **settings)

    assert_like_transformers(folder)


def test_a_post_processor_that_adds_a_bos_is_kept(folder: Path) -> None:
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}]
    single.append({"Sequence": {"id": "A", "type_id": 0}})
    bos = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": bos},
    }
    edit(folder / "tokenizer.json", post_processor=processor)

    assert_like_transformers(folder)
    ours = read_fast_tokenizer(folder)
    assert ours is not None
    assert ours.backend_tokenizer.encode("Hi").ids[0] == 1


def test_a_template_in_the_settings_is_taken_where_there_is_no_file(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template="{{ bos_token }}")

    assert_like_transformers(folder)


def test_tokens_named_again_in_the_settings_are_compared_and_older_files_left_alone(
    folder: Path,
) -> None:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    named = {str(token.pop("id")): token for token in added}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=named)
    edit(folder / "special_tokens_map.json", eos_token="<|endoftext|>")

    assert_like_transformers(folder)

    named["2"]["lstrip"] = True
    edit(folder / "tokenizer_config.json", added_tokens_decoder=named)

    assert read_fast_tokenizer(folder) is None


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": None}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("tokenizer_config.json", {"image_token": "<image>"}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<more>"]}),
        ("tokenizer_config.json", {"eos_token": "not yet a token"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": ""}]}),
        ("config.json", {"model_type": "qwen2"}),
        ("special_tokens_map.json", {"eos_token": "<|endoftext|>"}),
        ("added_tokens.json", {"<more>": 600}),
        ("chat_template.json", {"chat_template": ""}),
    ],
)
def test_what_is_not_understood_is_left_to_transformers(
    file: str, changes: dict[str, Any], folder: Path
) -> None:
    edit(folder / file, **changes)

    assert read_fast_tokenizer(folder) is None


def test_transformers_is_asked_where_the_folder_is_not_plain(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", extra_special_tokens=["<more>"])

    loaded = load_tokenizer(folder)

    assert loaded.backend_tokenizer.token_to_id("<more>") is not None
    assert loaded.special_tokens_map["eos_token"] == "<|im_end|>"


def test_a_tokenizer_that_runs_in_python_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        is_fast = False

    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_args, **_options: Slow())

    with pytest.raises(ConfigError, match="Slow, which runs in Python"):
        load_tokenizer(folder)


def test_what_is_saved_is_read_again_by_both(folder: Path, tmp_path: Path) -> None:
    original = read_fast_tokenizer(folder)
    assert original is not None
    original.backend_tokenizer.add_special_tokens([AddedToken("<ü>", special=True)])
    copy = tmp_path / "copy"
    copy.mkdir()
    edit(copy / "config.json", model_type="llama")

    original.save(copy)

    assert_like_transformers(copy)


def test_the_built_in_model_runs_without_importing_transformers(smollm2_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import remora.engine.llm; "
        "from remora.engine.tokens.tokenizer import Tokenizer; "
        "Tokenizer.load(Path(sys.argv[1])).render_chat([{'role': 'user', 'content': 'Hi'}]); "
        "print({'transformers', 'gguf', 'rich', 'huggingface_hub'} & set(sys.modules))"
    )

    command = [sys.executable, "-c", code, str(smollm2_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "set()"
