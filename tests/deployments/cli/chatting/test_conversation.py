"""The slash commands of a conversation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remora.deployments.cli.chatting.conversation import Conversation


def said(*texts: str) -> Conversation:
    conversation = Conversation("Be brief.")
    for turn, text in enumerate(texts):
        role = "assistant" if turn % 2 else "user"
        conversation.messages.append({"role": role, "content": text})
    return conversation


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), ("7", 7), ("true", True), ('["a"]', ["a"]), ("low", "low")],
)
def test_a_value_is_json_or_a_word(text: str, value: object) -> None:
    conversation = said()
    conversation.command(f"/set key {text}")

    assert conversation.settings == {"key": value}
    assert conversation.command("/set") == f"key = {json.dumps(value)}"
    assert conversation.command("/set key") == "key removed."
    assert conversation.settings == {}
    assert "defaults apply" in str(conversation.command("/set"))


def test_what_the_conversation_itself_sends_cannot_be_set() -> None:
    conversation = said()

    assert "itself" in str(conversation.command("/set messages []"))
    assert conversation.settings == {}


def test_it_is_saved_as_json_or_markdown_and_no_file_is_replaced(tmp_path: Path) -> None:
    conversation = said("France?", "Paris")
    conversation.command("/set temperature 0")

    for name in ("a.json", "a.md"):
        assert "Saved 3 messages" in str(conversation.command(f"/save {tmp_path / name}"))
    saved = json.loads((tmp_path / "a.json").read_text())

    assert saved == {"messages": conversation.messages, "temperature": 0}
    assert (tmp_path / "a.md").read_text().endswith("## Assistant\n\nParis\n")
    assert "exists" in str(conversation.command(f"/save {tmp_path / 'a.md'}"))
    assert "Cannot write" in str(conversation.command(f"/save {tmp_path / 'no' / 'a.md'}"))
    assert "Name a file" in str(conversation.command("/save"))


@pytest.mark.parametrize(("texts", "left"), [(("a", "b"), ["a"]), (("a",), ["a"]), ((), None)])
def test_only_a_message_of_the_user_gets_another_reply(
    texts: tuple[str, ...], left: list[str] | None
) -> None:
    conversation = said(*texts)

    shown = conversation.command("/regen")

    assert conversation.is_regenerated == (left is not None)
    assert ("no message" in str(shown)) == (left is None)
    assert [m["content"] for m in conversation.messages] == ["Be brief.", *(left or [])]


def test_help_lists_every_command() -> None:
    shown = str(said().command("/help"))

    for name in ("/set", "/system", "/clear", "/regen", "/save", "/help", "/exit"):
        assert name in shown
