"""A conversation in the terminal: its messages, sampling parameters and slash commands.

Knows no server and no terminal: a command changes the conversation and returns text to show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HELP = """/set KEY VALUE set a sampling parameter, such as /set temperature 0.5
/set KEY       remove it; /set shows all that are set
/system TEXT   set the system message and clear the conversation
/clear         clear the conversation
/regen         generate the last reply again
/save FILE     write the conversation: JSON if FILE ends in .json, else Markdown
/help          show this list
/exit          exit (or Ctrl-D); Ctrl-C stops a reply"""
# Keys of a request that the conversation itself sets.
_TAKEN = frozenset({"model", "messages", "stream", "stream_options", "n"})


class Conversation:
    """The messages of a conversation, and the slash commands that change them.

    settings:       fields of each request besides the messages
    is_regenerated: whether a command asked for another reply to the last message
    """

    def __init__(
        self, system: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.settings: dict[str, Any] = dict(settings or {})
        self.is_regenerated = False
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
        commands: dict[str, Callable[[str], str]] = {
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set,
            "/save": self._save,
            "/regen": self._regenerate,
            "/help": lambda _: HELP,
        }
        run = commands.get(name)
        return f"Unknown command {name}.\n{HELP}" if run is None else run(rest.strip())

    def _clear(self, _rest: str) -> str:
        self.restart(self.system)
        return "Conversation cleared."

    def _set_system(self, text: str) -> str:
        self.restart(text or None)
        return "System message set." if self.system else "System message removed."

    def _set(self, rest: str) -> str:
        key, _, text = rest.partition(" ")
        if not key:
            values = (f"{name} = {json.dumps(value)}" for name, value in self.settings.items())
            return "\n".join(values) or "Nothing is set: the server's defaults apply."
        if key in _TAKEN:
            return f"{key} is set by the conversation itself; set a sampling parameter."
        if not text.strip():
            known = self.settings.pop(key, None) is not None
            return f"{key} removed." if known else f"{key} is not set."
        self.settings[key] = _value(text.strip())
        return f"{key} = {json.dumps(self.settings[key])}"

    def _save(self, name: str) -> str:
        if not name:
            return "Name a file: /save FILE"
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self._as_json() if path.suffix == ".json" else self._as_markdown())
        except FileExistsError:
            return f"{path} exists; choose another name."
        except OSError as error:
            return f"Cannot write {path}: {error.strerror or error}"
        return f"Saved {len(self.messages)} messages to {path}."

    def _regenerate(self, _rest: str) -> str:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            return "There is no message to reply to."
        self.is_regenerated = True
        return "Generating another reply."

    def _as_json(self) -> str:
        content = {"messages": self.messages, **self.settings}
        return json.dumps(content, ensure_ascii=False, indent=2) + "\n"

    def _as_markdown(self) -> str:
        return "\n".join(f"## {m['role'].title()}\n\n{m['content']}\n" for m in self.messages)


def _value(text: str) -> Any:
    """Return text as JSON, or as it is: a number, true, a list, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text
