"""`remora chat`: chat with a running server in the terminal.

Ctrl-C cancels the current reply by closing its connection, and keeps the text received so far in
the conversation. Ctrl-D exits. Terminals show Markdown; elsewhere replies are plain text.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from remora.deployments.cli.chatting.conversation import Conversation
from remora.deployments.cli.chatting.display import reply_on, speed_line
from remora.deployments.cli.options import DEFAULT_URL, ApiKey, ServedModel
from remora.deployments.cli.terminal import Failure, complain, note

if TYPE_CHECKING:
    from remora.deployments.cli.server_client import ServerClient


def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = DEFAULT_URL,
    model: ServedModel = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of a reply.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 = greedy.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show replies as plain text, not as Markdown.")
    ] = False,
    api_key: ApiKey = None,
) -> None:
    """Chat with a running server in the terminal."""
    from remora.deployments.cli.server_client import ServerClient  # imports httpx

    with suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history
    console = Console(stderr=True, highlight=False)
    given = {"max_tokens": max_tokens, "temperature": temperature}
    settings = {key: value for key, value in given.items() if value is not None}
    conversation = Conversation(system, settings)
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
                conversation.messages.append({"role": "user", "content": line})
            if conversation.is_regenerated or (line and not line.startswith("/")):
                conversation.is_regenerated = False
                _take_turn(server, conversation, console, model=name, is_plain=plain)


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
    console: Console,
    *,
    model: str,
    is_plain: bool,
) -> None:
    """Ask for a reply, show it as it arrives, and add what arrived to the conversation."""
    messages = conversation.messages
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    began = time.monotonic()
    first_s = 0.0
    stream = server.stream_chat(messages, usage.update, model=model, **conversation.settings)
    try:
        with reply_on(Console(highlight=False), is_plain=is_plain) as shown:
            try:
                for piece in stream:
                    if piece and not first_s:
                        first_s = time.monotonic() - began
                    pieces.append(piece)
                    shown.add(piece)
            except KeyboardInterrupt:
                shown.stopped()
            finally:
                stream.close()
    except Failure as error:
        complain(str(error))
    if usage:
        seconds = time.monotonic() - began
        console.print(speed_line(usage, first_s=first_s, seconds=seconds), style="dim")
    if pieces:
        messages.append({"role": "assistant", "content": "".join(pieces)})
    else:
        messages.pop()
