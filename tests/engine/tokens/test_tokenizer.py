"""Loading, encoding, the bytes of single tokens, and chat templates."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from remora.configs.errors import ConfigError, InvalidRequest
from remora.engine.tokens.tokenizer import Tokenizer
from tests.engine.tokens.vocabularies import make_sentencepiece
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE, make_tiny_tokenizer

TINY = Tokenizer(make_tiny_tokenizer())
USER = {"role": "user", "content": "Hi"}


def make_with_template(template: str | None) -> Tokenizer:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return Tokenizer(tokenizer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_loaded_with_all_ids_that_end_a_sequence(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))

    tokenizer = Tokenizer.load(folder)

    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("content", [None, "{", "{}", "[]"])
def test_a_missing_or_broken_tokenizer_file_is_refused(folder: Path, content: str | None) -> None:
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)

    with pytest.raises(ConfigError, match="no tokenizer"):
        Tokenizer.load(folder)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_text_survives_encoding(text: str) -> None:
    ids = TINY.encode(text, add_special_tokens=True)

    assert TINY.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(TINY.token_bytes, ids)) == text.encode()
    assert len(text) <= len(ids) * TINY.max_token_chars


def test_control_tokens_are_skipped_on_request() -> None:
    ids = TINY.encode("Hi<|im_end|>", add_special_tokens=False)

    assert ids[-1] == 2
    assert TINY.decode(ids, skip_special_tokens=True) == "Hi"
    assert TINY.decode(ids, skip_special_tokens=False) == "Hi<|im_end|>"


def test_truncation_stored_with_a_tokenizer_is_not_applied() -> None:
    stored = make_tiny_tokenizer()
    stored.backend_tokenizer.enable_truncation(4)
    stored.backend_tokenizer.enable_padding(length=64)

    ids = Tokenizer(stored).encode("one two three four five six", add_special_tokens=True)

    assert Tokenizer(stored).decode(ids, skip_special_tokens=False) == "one two three four five six"


def test_each_token_has_its_bytes_and_its_text() -> None:
    space_word = TINY.encode(" the", add_special_tokens=False)
    shark = TINY.encode("🦈", add_special_tokens=False)

    assert "".join(map(TINY.token_text, space_word)) == " the"
    assert b"".join(map(TINY.token_bytes, shark)) == "🦈".encode()
    assert TINY.token_text(shark[0]) == "\ufffd"
    assert TINY.token_text(2) == SPECIAL_TOKENS[2]
    assert (TINY.token_bytes(10**6), TINY.token_text(10**6)) == (b"", "")


def test_sentencepiece_tokens_keep_their_leading_space() -> None:
    tokenizer = make_sentencepiece()
    names = tokenizer._backend.get_vocab()

    assert tokenizer.token_text(names["▁Hello"]) == " Hello"
    assert tokenizer.token_bytes(names["<0xE4>"]) == b"\xe4"


def test_one_tokenizer_serves_many_threads() -> None:
    texts = [f"{number} " * 40 + "🙂" for number in range(8)]

    def survives(text: str) -> bool:
        rounds = (TINY.encode(text, add_special_tokens=False) for _ in range(50))
        return all(TINY.decode(ids, skip_special_tokens=False) == text for ids in rounds)

    with ThreadPoolExecutor(len(texts)) as threads:
        assert all(threads.map(survives, texts))


def test_a_chat_is_written_by_the_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]

    text = TINY.render_chat(messages)

    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_final_message_can_be_continued() -> None:
    text = TINY.render_chat(
        [USER, {"role": "assistant", "content": "Hello th"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )

    assert text.endswith("<|im_start|>assistant\nHello th")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ 'x' + messages[0].missing + 1 }}", "missing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "zero"),
        ("{% for", "end of template"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_template_raises_is_told_to_the_caller(template: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        make_with_template(template).render_chat([USER])

    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("messages", "options", "param", "words"),
    [
        ([], {}, "messages", "empty"),
        ([{"content": "Hi"}], {}, "messages", "role"),
        ([USER, {"role": 3}], {}, "messages", r"messages\[1\]"),
        ([USER], {"continue_final_message": True}, "continue_final_message", "both"),
        *(
            ([USER], {"template_kwargs": {name: "x"}}, "chat_template_kwargs", f"'{name}'")
            for name in ("tokenize", "chat_template")
        ),
    ],
)
def test_chats_that_make_no_sense_are_refused(
    messages: list[dict[str, Any]], options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        TINY.render_chat(messages, **options)

    assert caught.value.param == param


def called_with(arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = called_with('{"a": 1}')
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def test_tools_and_earlier_calls_are_described_where_the_template_knows_none() -> None:
    text = TINY.render_chat([USER, CALLED, RESULT], tools=[ADD])

    assert text.startswith("<|im_start|>system\nYou can call these functions.")
    assert '{"name": "add", "parameters": {"type": "object"}}' in text
    assert '<|im_start|>assistant\n[{"name": "add", "parameters": {"a": 1}}]<|im_end|>' in text
    assert "<|im_start|>user\nThe call of add (c1) returned: 3<|im_end|>" in text


ARGUMENTS = "{% if tools %}{% endif %}{{ messages[0].tool_calls[0].function.arguments }}"
CALLS = (
    "{{ tools | length }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments.a }}{% endfor %}|{{ m.role }} {{ m.name }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "options", "text"),
    [
        ("{{ mood }}:{{ messages[0].content }}", [USER], {"template_kwargs": {"mood": "calm"}},
         "calm:Hi"),
        ("{{ documents[0].text }}", [USER], {"documents": [{"text": "so"}]}, "so"),
        # Arguments that are an object reach the template as one, others as they are.
        (CALLS, [USER, CALLED, RESULT], {"tools": [ADD]}, "1|user 1|assistant |tool add"),
        *((ARGUMENTS, [called_with(text)], {}, text) for text in ("{", "[1]", "3")),
    ],
)  # fmt: skip
def test_what_a_chat_holds_reaches_the_template(
    template: str, messages: list[dict[str, Any]], options: dict[str, Any], text: str
) -> None:
    assert make_with_template(template).render_chat(messages, **options) == text


def test_a_template_for_tools_is_taken_when_there_are_some() -> None:
    stored = make_tiny_tokenizer()
    stored.chat_template = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    tokenizer = Tokenizer(stored)

    assert tokenizer.render_chat([USER]) == "plain"
    assert tokenizer.render_chat([USER], tools=[ADD]) == "add"
    assert tokenizer.template_source == "plain\n{{ tools[0].function.name }}"
    assert tokenizer.template_variables == {"tools"}


def test_a_response_template_is_read_from_the_folder(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    template = {"fields": {"content": {}}, "start_anchor": "assistant"}
    settings = json.loads(file.read_text()) | {"response_template": template}
    file.write_text(json.dumps(settings))

    assert Tokenizer.load(folder).response_template == template


def test_the_file_of_older_checkpoints_has_a_template_too(folder: Path) -> None:
    old = folder / "chat_template.json"
    old.write_text(json.dumps({"chat_template": "old"}))

    assert Tokenizer.load(folder).render_chat([USER]) != "old"
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat([USER]) == "old"
    assert tokenizer.template_place == f"chat_template.json in {folder}"
    old.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ConfigError, match="is a int; a text is expected"):
        Tokenizer.load(folder)


def test_templates_of_their_own_files_are_known_by_name(folder: Path) -> None:
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("with tools")

    tokenizer = Tokenizer.load(folder)

    assert tokenizer.render_chat([USER], tools=[ADD]) == "with tools"
    assert tokenizer.render_chat([USER]) != "with tools"
    both = f"chat_template.jinja and additional_chat_templates in {folder}"
    assert tokenizer.template_place == both
    tokenizer.choose_template("tool_use")
    assert tokenizer.template_place == f"'tool_use' of {both}, as model.chat_template says"


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        make_with_template(None).render_chat([USER])


def test_the_built_in_model_renders_and_encodes_like_transformers(smollm2_path: Path) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(smollm2_path)
    tokenizer = Tokenizer.load(smollm2_path)

    text = tokenizer.render_chat([USER])

    expected = reference.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.eos_token_ids == (2,)
