"""How the commands speak: answers to stdout, everything else to stderr, faults in one line.

A fault the user can mend ends the command with exit code 2 and no traceback. Anything else is a
bug of ours and keeps its traceback.
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
    """A command cannot do what was asked; the message is all that the user sees."""


class Commands(TyperGroup):
    """The group of all commands; the one place where faults become exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises typer.Exit for faults that the user can mend."""
        try:
            return super().invoke(ctx)
        except (RemoraError, Failure) as error:
            complain(str(error))
            raise typer.Exit(EXIT_FAULT) from None


def complain(message: str) -> None:
    """Write a fault to stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(message)}")


def answer(text: str, *, end: str = "\n") -> None:
    """Write plain text to stdout, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()
