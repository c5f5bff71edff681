"""Terminal output and exit codes of the commands: results to stdout, the rest to stderr.

An error that the user can fix ends the command with one line and exit code 2. Any other exception
is a bug in remora and keeps its traceback.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from remora.configs.errors import RemoraError

EXIT_FAULT = 2


class Failure(Exception):
    """A command cannot continue; the user sees only the message.

    details:  what a command shows with --verbose besides, such as a traceback
    """

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Commands(TyperGroup):
    """A command group that turns errors into exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises typer.Exit for errors that the user can fix."""
        try:
            return super().invoke(ctx)
        except (RemoraError, Failure) as error:
            complain(str(error))
            raise typer.Exit(EXIT_FAULT) from None


def complain(message: str) -> None:
    """Write an error message to stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(message)}")


def note(message: str) -> None:
    """Write a remark to stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[yellow]note:[/] {escape(message)}")


def detail(text: str) -> None:
    """Write what --verbose asks for to stderr."""
    sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.flush()


def answer(text: str, *, end: str = "\n") -> None:
    """Write plain text to stdout and flush it."""
    sys.stdout.write(text + end)
    sys.stdout.flush()
