"""`remora chat` against a scripted server, typed to through stdin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from remora.deployments.cli.main import app
from remora.deployments.cli.server_client import ServerClient
from tests.deployments.cli.fake_server import STOP, FakeServer, chat_event

MakeServer = Callable[..., FakeServer]
PARIS = (200, chat_event("Par") + chat_event("is") + STOP)


def messages(*said: str) -> list[dict[str, str]]:
    """Return what user and assistant say in turns."""
    return [
        {"role": "assistant" if turn % 2 else "user", "content": text}
        for turn, text in enumerate(said)
    ]


def talk(server: FakeServer, typed: str, *flags: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--url", server.url, *flags], input=typed)


def test_a_reply_is_shown_and_remembered(make_server: MakeServer) -> None:
    server = make_server(PARIS, (200, chat_event("Berlin") + STOP))

    result = talk(server, "France?\nGermany?\n")

    assert result.exit_code == 0
    assert result.stdout == "Paris\nBerlin\n"
    assert server.posts[1]["messages"] == messages("France?", "Paris", "Germany?")


def test_lines_can_be_edited(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "readline", raising=False)

    talk(make_server(), "")

    assert "readline" in sys.modules  # its import gives input() line editing and history


def test_only_given_parameters_are_sent(make_server: MakeServer) -> None:
    server = make_server(PARIS, PARIS)

    talk(server, "a\n")
    talk(server, "a\n", "--max-tokens", "5", "--temperature", "0.5", "--system", "Be brief.")

    options = {"include_usage": True}
    sent = {"model": "tiny", "messages": messages("a"), "stream": True, "stream_options": options}
    assert server.posts[0] == {"path": "/v1/chat/completions", **sent}
    assert server.posts[1]["max_tokens"] == 5
    assert server.posts[1]["temperature"] == 0.5
    assert server.posts[1]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_clear_forgets_and_keeps_the_system_message(make_server: MakeServer) -> None:
    server = make_server(PARIS, PARIS)

    talk(server, "/system Be kind.\nfirst\n/clear\nsecond\n")

    system = {"role": "system", "content": "Be kind."}
    assert server.posts[1]["messages"] == [system, *messages("second")]


@pytest.mark.parametrize("line", ["/exit", "/quit"])
def test_exit_sends_nothing_and_unknown_commands_show_the_list(
    make_server: MakeServer, line: str
) -> None:
    server = make_server()

    result = talk(server, f"/frobnicate\n{line}\nhello\n")

    assert result.exit_code == 0
    assert server.posts == []
    assert "/frobnicate" in result.stderr
    assert "/clear" in result.stderr


@pytest.mark.parametrize(
    ("status", "body", "message", "kept"),
    [
        (400, '{"error": {"message": "prompt too long"}}', "prompt too long (HTTP 400)", None),
        (200, 'data: {"error": {"message": "engine died"}}\n\n', "engine died", None),
        (200, chat_event("Par"), "[DONE]", "Par"),
    ],
)
def test_after_an_error_the_conversation_goes_on_with_what_arrived(
    make_server: MakeServer, status: int, body: str, message: str, kept: str | None
) -> None:
    server = make_server((status, body), PARIS)

    result = talk(server, "a\nb\n")

    assert message in result.stderr
    assert result.stdout.endswith("Paris\n")
    assert server.posts[1]["messages"] == (messages("a", kept, "b") if kept else messages("b"))


def test_ctrl_c_closes_the_stream_and_keeps_what_arrived(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(PARIS)
    closed = []

    def interrupted(self: ServerClient, *_given: Any, **fields: Any) -> Iterator[str]:
        try:
            yield "Once upon"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    original = ServerClient.stream_chat
    answers: Iterator[Any] = iter([interrupted, original])
    monkeypatch.setattr(
        ServerClient, "stream_chat", lambda self, *a, **k: next(answers)(self, *a, **k)
    )

    result = talk(server, "a tale\nFrance?\n")

    assert result.stdout.splitlines()[0] == "Once upon [stopped]"
    assert closed == [True]
    assert server.posts[0]["messages"][1] == {"role": "assistant", "content": "Once upon"}


def test_ctrl_c_at_the_prompt_does_not_exit(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: Iterator[Any] = iter([KeyboardInterrupt, "hello", EOFError])

    def read(self: Any, *args: Any, **kwargs: Any) -> str:
        value = next(typed)
        if isinstance(value, str):
            return value
        raise value

    monkeypatch.setattr(Console, "input", read)
    server = make_server(PARIS)

    result = talk(server, "")

    assert result.exit_code == 0
    assert len(server.posts) == 1


USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'


def test_a_parameter_that_is_set_is_sent_and_another_reply_is_generated(
    make_server: MakeServer,
) -> None:
    server = make_server((200, chat_event("Rome") + USAGE + STOP), PARIS)

    result = talk(server, '/set top_k 5\n/set stop ["x"]\nFrance?\n/set stop\n/regen\n')

    first, second = server.posts
    assert (first["top_k"], first["stop"]) == (5, ["x"])
    assert second["messages"] == messages("France?")
    assert "stop" not in second
    assert result.stdout == "Rome\nParis\n"
    assert "3 tokens in " in result.stderr
    assert "tokens/s" in result.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[", "ftp://x"])
def test_a_url_without_a_server_is_refused_in_one_line(url: str) -> None:
    result = CliRunner().invoke(app, ["chat", "--url", url])

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert url in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_model_is_refused_with_the_known_ones(make_server: MakeServer) -> None:
    result = talk(make_server(models=("a", "b")), "", "--model", "c")

    assert result.exit_code == 2
    assert "a, b" in result.stderr


def test_the_address_may_end_in_v1_and_the_key_is_read_from_the_environment(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(PARIS)
    monkeypatch.setenv("REMORA_API_KEY", "sk-one")

    result = CliRunner().invoke(app, ["chat", "--url", server.url + "/v1/"], input="a\n")

    assert result.stdout == "Paris\n"
    assert server.keys == ["Bearer sk-one"] * 2


def test_a_field_that_the_server_ignores_is_named_once(make_server: MakeServer) -> None:
    server = make_server(PARIS, PARIS)
    server.headers = (
        "x-remora-ignored-fields: temperature, odd\r\n"
        "x-remora-suggested-fields: temperature=heat\r\n"
    )

    result = talk(server, "a\nb\n", "--temperature", "0.5")

    assert result.stdout == "Paris\nParis\n"
    notes = [line for line in result.stderr.splitlines() if "note:" in line]
    assert len(notes) == 2
    assert "temperature; did you mean heat?" in notes[0]
    assert notes[1].endswith("odd")
