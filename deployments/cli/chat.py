"""`remora chat`: a conversation in the terminal with a running server.

Ctrl-C stops the answer that is being written (the server is told by closing the connection) and
keeps what was said; Ctrl-D leaves.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from remora.deployments.cli.bench_options import ApiKey
from remora.deployments.cli.server_client import DEFAULT_URL, ServerClient
from remora.deployments.cli.terminal import Failure, answer, complain

HELP = """/clear         forget the conversation
/system TEXT   set the system message and forget the conversation
/help          this list
/exit          leave (so does Ctrl-D); Ctrl-C stops an answer"""


class Conversation:
    """The messages so far, and what the slash commands do to them."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self.restart(system)

    def restart(self, system: str | None) -> None:
        """Forget everything but the system message given."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, role: str, content: str) -> None:
        """Append a message."""
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Remove the last message: its answer never came."""
        self.messages.pop()

    def command(self, line: str) -> str | None:
        """Carry out a slash command and return what to show; None = leave."""
        name, _, rest = line.partition(" ")
        if name in {"/exit", "/quit"}:
            return None
        if name == "/clear":
            self.restart(self.system)
            return "The conversation is forgotten."
        if name == "/system":
            self.restart(rest.strip() or None)
            return "The system message is set." if self.system else "No system message."
        return HELP if name == "/help" else f"{name} is not a command.\n{HELP}"


def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model (default: the first served).")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = always the likeliest.")] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a running server in the terminal."""
    with suppress(ImportError):
        pass  # gives input() line editing and history
    console = Console(stderr=True, highlight=False)
    conversation = Conversation(system)
    with ServerClient(url, api_key=api_key) as server:
        name = server.pick_model(model)
        console.print(f"[dim]{escape(name)} at {escape(server.url)}; /help lists the commands[/]")
        while (line := _read_line(console)) is not None:
            if line.startswith("/"):
                reply = conversation.command(line)
                if reply is None:
                    return
                console.print(escape(reply), style="dim")
            elif line:
                _take_turn(
                    server,
                    conversation,
                    line,
                    model=name,
                    max_tokens=max_tokens,
                    temperature=temperature,
                )


def _read_line(console: Console) -> str | None:
    """Return the next line typed; None at the end of input. Ctrl-C starts the line anew."""
    while True:
        try:
            return console.input("[bold cyan]>[/] ").strip()
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D or /exit leaves[/]")


def _take_turn(
    server: ServerClient,
    conversation: Conversation,
    line: str,
    *,
    model: str,
    max_tokens: int | None,
    temperature: float | None,
) -> None:
    """Ask, show the answer as it comes, and remember as much of it as there was."""
    conversation.say("user", line)
    pieces: list[str] = []
    stream = server.stream_chat(
        conversation.messages, model=model, max_tokens=max_tokens, temperature=temperature
    )
    try:
        for piece in stream:
            pieces.append(piece)
            answer(piece, end="")
    except KeyboardInterrupt:
        answer(" [stopped]", end="")
    except Failure as error:
        complain(str(error))
    finally:
        stream.close()
    answer("")
    if pieces:
        conversation.say("assistant", "".join(pieces))
    else:
        conversation.take_back()
