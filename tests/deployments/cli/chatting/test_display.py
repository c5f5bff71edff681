"""How a reply is shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from remora.deployments.cli.chatting.display import (
    MarkdownReply,
    PlainReply,
    reply_on,
    speed_line,
    split_blocks,
)

CODE = "```python\na = 1\n\nb = 2\n```\n"


@pytest.mark.parametrize(
    ("text", "blocks", "rest"),
    [
        ("one", [], "one"),
        ("one\n\ntwo", ["one"], "two"),
        ("one\n\n\n\ntwo\n\n", ["one", "two"], ""),
        (CODE, [], CODE),
        (f"{CODE}\nmore", [CODE.removesuffix("\n")], "more"),
        ("```\nopen\n\nstill open", [], "```\nopen\n\nstill open"),
    ],
)
def test_blocks_are_complete_at_a_blank_line_outside_of_code(
    text: str, blocks: list[str], rest: str
) -> None:
    found, left = split_blocks(text)

    assert [block.strip("\n") for block in found] == blocks
    assert left.strip("\n") == rest.strip("\n")


def terminal(stream: io.StringIO) -> Console:
    return Console(file=stream, force_terminal=True, width=60, color_system="standard", _environ={})


def test_a_terminal_gets_markdown_whatever_the_pieces() -> None:
    text = f"# Title\n\nSome **bold** text.\n\n{CODE}\nThe end."
    shown = []
    for size in (1, 7, len(text)):
        stream = io.StringIO()
        with reply_on(terminal(stream), is_plain=False) as reply:
            for at in range(0, len(text), size):
                reply.add(text[at : at + size])
        shown.append(stream.getvalue())

    for output in shown:
        assert "\x1b[1mbold\x1b[0m" in output
        last = output[output.rindex("Title") :]
        assert last.index("bold") < last.index("The end.")
        assert "**bold** text.\n\n" not in output


def test_other_outputs_get_plain_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert isinstance(reply_on(terminal(io.StringIO()), is_plain=True), PlainReply)
    assert isinstance(reply_on(terminal(io.StringIO()), is_plain=False), MarkdownReply)
    with reply_on(Console(file=io.StringIO()), is_plain=False) as reply:
        reply.add("**a**")
        reply.stopped()

    assert capsys.readouterr().out == "**a** [stopped]\n"


@pytest.mark.parametrize(
    ("num_tokens", "reasoning", "first_s", "seconds", "line"),
    [
        (61, 40, 0.5, 2.5, "61 tokens in 2.5 s, the first after 0.50 s, then 10.0 tokens/s"),
        (21, None, 0.5, 2.5, "21 tokens in 2.5 s, the first after 0.50 s, then 10.0 tokens/s"),
        (1, None, 0.5, 0.5, "1 token in 0.5 s, the first after 0.50 s"),
    ],
)
def test_the_speed_is_that_after_the_first_token(
    num_tokens: int, reasoning: int | None, first_s: float, seconds: float, line: str
) -> None:
    details = {"reasoning_tokens": reasoning}
    usage = {"completion_tokens": num_tokens, "completion_tokens_details": details}

    assert speed_line(usage, first_s=first_s, seconds=seconds) == line
