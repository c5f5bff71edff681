"""The shell commands of README.md and docs/*.md, read from their pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[4]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SHELLS = ("bash", "sh", "console", "shell")
_FENCE = re.compile(r"\s*```(\w*)")
_INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?remora [^`\n]+)`")


@dataclass(frozen=True)
class Command:
    """A command.

    place:        page and line
    text:         as a shell would get it
    environment:  variables set in front of it
    words:        program and arguments, without redirections; `.venv/bin/remora` is remora
    """

    place: str
    text: str
    environment: dict[str, str]
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program's name."""
        return self.words[0]


def blocks() -> list[Command]:
    """Return the commands of code blocks: of a shell, or after a prompt `$`."""
    return [command for page in PAGES for command in _of_page(page)]


def inline() -> list[Command]:
    """Return remora's commands in running text and tables."""
    found = []
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            found += [_command(page, number, match[1]) for match in _INLINE.finditer(line)]
    return found


def _of_page(page: Path) -> Iterator[Command]:
    language: str | None = None
    pending, began = "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if fence:
            assert not pending, f"{page.name}:{began}: unfinished: {pending}"
            language = fence[1] if language is None else None
        elif language in SHELLS or (language == "" and line.startswith("$ ")):
            began = began if pending else number
            pending += line.removeprefix("$ ")
            if _is_whole(pending):
                if pending.strip():
                    yield _command(page, began, pending)
                pending = ""
            else:
                pending = pending.removesuffix("\\") + ("" if pending.endswith("\\") else "\n")


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # an open quote, or a backslash at the end
        return False
    return not text.endswith("\\")


def _command(page: Path, number: int, text: str) -> Command:
    words = shlex.split(text, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    environment = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    words[0] = words[0].removeprefix(".venv/bin/")
    return Command(f"{page.name}:{number}", text, environment, tuple(words))
