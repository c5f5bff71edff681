"""`remora chat`: chat with a running server in the terminal.

Ctrl-C cancels the current reply by closing its connection, and keeps the text received so far in
the conversation. Ctrl-D exits.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from remora.deployments.cli.options import DEFAULT_URL, ApiKey, ServedModel
from remora.deployments.cli.terminal import Failure, answer, complain, note

if TYPE_CHECKING:
    from remora.deployments.cli.server_client import ServerClient

HELP = """/clear         clear the conversation
/system TEXT   set the system message and clear the conversation
/help          show this list
/exit          exit (or Ctrl-D); Ctrl-C stops a reply"""


class Conversation:
    """The messages of a conversation, and the slash commands that change them."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self.restart(system)

    def restart(self, system: str | None) -> None:
        """Clear the conversation and set its system message."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def command(self, line: str) -> str | None:
        """Run a slash command and return the text to show; None = exit."""
        name, _, rest = line.partition(" ")
        if name in {"/exit", "/quit"}:
            return None
        if name == "/clear":
            self.restart(self.system)
            return "Conversation cleared."
        if name == "/system":
            self.restart(rest.strip() or None)
            return "System message set." if self.system else "System message removed."
        return HELP if name == "/help" else f"Unknown command {name}.\n{HELP}"


def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = DEFAULT_URL,
    model: ServedModel = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of a reply.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 = greedy.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Chat with a running server in the terminal."""
    from remora.deployments.cli.server_client import ServerClient  # imports httpx

    with suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history
    console = Console(stderr=True, highlight=False)
    conversation = Conversation(system)
    with closing(ServerClient(url, api_key=api_key, on_ignored=note)) as server:
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
    """Return the next line of input, or None at its end. Ctrl-C discards the current line."""
    while True:
        try:
            return console.input("[bold cyan]>[/] ").strip()
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D or /exit exits[/]")


def _take_turn(
    server: ServerClient,
    conversation: Conversation,
    line: str,
    *,
    model: str,
    max_tokens: int | None,
    temperature: float | None,
) -> None:
    """Send a message, print the reply as it arrives, and add what arrived to the conversation."""
    messages = conversation.messages
    messages.append({"role": "user", "content": line})
    pieces: list[str] = []
    stream = server.stream_chat(
        messages, model=model, max_tokens=max_tokens, temperature=temperature
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
        messages.append({"role": "assistant", "content": "".join(pieces)})
    else:
        messages.pop()
