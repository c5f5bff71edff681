"""The tools that a request offers to the model, and how the model may use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    parameters:  JSON schema of its arguments, an object
    strict:      whether a grammar constrains calls to that schema
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def enforced_parameters(self) -> dict[str, Any]:
        """The schema that constrains arguments; an empty list of properties allows none."""
        schema = {"type": "object", **self.parameters}
        if schema.get("properties") == {} and schema.keys() <= {"type", "properties", "required"}:
            schema["additionalProperties"] = False
        return schema


class ToolChoice(StrEnum):
    """Whether the model calls a tool: never, at its choice, always, or always the named one."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A request's tools and tool choice.

    name:      the tool that must be called, with ToolChoice.NAMED
    parallel:  whether one reply may contain several calls
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.NONE
    name: str | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether a grammar constrains the reply to calls and nothing else."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    def as_openai(self) -> list[dict[str, Any]]:
        """Return the names and parameters of the tools in OpenAI's form."""
        return [
            {"type": "function", "function": {"name": t.name, "parameters": dict(t.parameters)}}
            for t in self.tools
        ]


NO_TOOLS = ToolUse()
