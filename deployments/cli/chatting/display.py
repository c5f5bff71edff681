"""Show a reply while it arrives: plain text, or Markdown on a terminal, block by block.

A block of Markdown is what blank lines separate, or a whole fenced block of code. A block that is
complete is printed for good; an incomplete block is shown below as plain text.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from remora.deployments.cli.terminal import answer

if TYPE_CHECKING:
    from rich.live import Live

_FENCES = ("```", "~~~")


class PlainReply:
    """A reply as plain text."""

    def __enter__(self) -> Self:
        """Begin a reply."""
        return self

    def add(self, text: str) -> None:
        """Show more of the reply."""
        answer(text, end="")

    def stopped(self) -> None:
        """Mark the reply as cut off by the user."""
        answer(" [stopped]", end="")

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End the reply's last line."""
        answer("")


class MarkdownReply:
    """A reply as Markdown on a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._rest = ""
        self._live: Live = Live(
            console=console, transient=True, auto_refresh=False, vertical_overflow="crop"
        )

    def __enter__(self) -> Self:
        """Begin a reply."""
        self._live.start()
        return self

    def add(self, text: str) -> None:
        """Show more of the reply."""
        from rich.text import Text

        blocks, self._rest = split_blocks(self._rest + text)
        for block in blocks:
            self._print(block)
        # A block that is higher than the terminal shows its end.
        lines = self._rest.split("\n")[-max(1, self._console.height // 2) :]
        self._live.update(Text("\n".join(lines)), refresh=True)

    def stopped(self) -> None:
        """Mark the reply as cut off by the user."""
        self._rest += " [stopped]"

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Print the last block."""
        self._live.update("", refresh=True)
        self._live.stop()
        if self._rest.strip():
            self._print(self._rest)

    def _print(self, block: str) -> None:
        from rich.markdown import Markdown

        self._console.print(Markdown(block))


def reply_on(console: Console, *, is_plain: bool) -> PlainReply | MarkdownReply:
    """Return how to show a reply on `console`, which writes to standard output."""
    if is_plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainReply()
    return MarkdownReply(console)


def split_blocks(text: str) -> tuple[list[str], str]:
    """Return the complete blocks of Markdown, and the rest."""
    blocks: list[str] = []
    block: list[str] = []
    fence = ""
    *lines, last = text.split("\n")
    for line in lines:
        begins = line.lstrip()[:3]
        if fence:
            fence = "" if begins == fence else fence
        elif begins in _FENCES:
            fence = begins
        if line.strip() or fence or not block:
            block.append(line)
            continue
        blocks.append("\n".join(block))
        block = []
    return [each for each in blocks if each.strip()], "\n".join([*block, last])


def speed_line(usage: Mapping[str, Any], *, first_s: float, seconds: float) -> str:
    """Return a line about a reply: its tokens, their speed, and the time to the first.

    usage:    the server's numbers of tokens; those of reasoning come before the first one shown
    first_s:  to the first text
    seconds:  of the whole reply
    """
    num_tokens = int(usage["completion_tokens"])
    details = usage.get("completion_tokens_details") or {}
    num_shown = num_tokens - int(details.get("reasoning_tokens") or 0)
    count = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    text = f"{count} in {seconds:.1f} s, the first after {first_s:.2f} s"
    if num_shown > 1 and seconds > first_s:
        text += f", then {(num_shown - 1) / (seconds - first_s):.1f} tokens/s"
    return text
