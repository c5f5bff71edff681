"""Terminal output and exit codes of the commands: results to stdout, the rest to stderr.

An error that the user can fix ends the command with one line and exit code 2. Any other exception
is a bug in remora and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

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


class LazyCommands(Commands):
    """A command group that imports a command's module when the command runs.

    commands_at:  name -> (where its function or its group is, as "module:attribute"; the summary
                  that `--help` and shell completion show)
    """

    commands_at: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._loaded: dict[str, Any] = {}
        for name, (_, summary) in self.commands_at.items():
            self.commands[name] = TyperCommand(name, help=summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that `args` names."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.load(name), rest

    def load(self, name: str) -> Any:
        """Return a command with its options and arguments, whose module is imported once."""
        if name not in self._loaded:
            self._loaded[name] = self._import(name)
        return self._loaded[name]

    def _import(self, name: str) -> Any:
        module, _, attribute = self.commands_at[name][0].partition(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            function = found
            found = typer.Typer(add_completion=False)
            found.command(name)(function)
        return typer.main.get_command(found)


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
