"""The tools that a request offers to the model, and what it says about their use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    parameters:  JSON schema of its arguments, an object
    strict:      whether calls must match that schema, whatever the model would rather write
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def enforced_parameters(self) -> dict[str, Any]:
        """The schema that arguments are held to: one that lists no properties means none."""
        schema = {"type": "object", **self.parameters}
        if schema.get("properties") == {} and schema.keys() <= {"type", "properties", "required"}:
            schema["additionalProperties"] = False
        return schema


class ToolChoice(StrEnum):
    """Who decides whether a tool is called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request says about tools.

    name:      of the one tool that must be called, with ToolChoice.NAMED
    parallel:  whether one reply may hold several calls
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.NONE
    name: str | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether the reply is to be calls and nothing else, held to that by a grammar."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    def as_openai(self) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's form, as far as calls are read by it."""
        return [
            {"type": "function", "function": {"name": t.name, "parameters": dict(t.parameters)}}
            for t in self.tools
        ]


NO_TOOLS = ToolUse()
