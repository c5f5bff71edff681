"""Chooses the formats of a model's replies: by name, or by the model's checkpoint.

`auto` tries the checkpoint's response template, then the signs in its chat template, then none.
Response templates and gpt-oss's format read reasoning and calls together, so both keys must name
them or be `auto`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from remora.configs.errors import ConfigError
from remora.deployments.parsers.harmony import NAMES as HARMONY_NAMES
from remora.deployments.parsers.harmony import HarmonyFormat
from remora.deployments.parsers.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_format,
)
from remora.deployments.parsers.response_template import CheckpointFormat
from remora.deployments.parsers.template_signs import (
    HARMONY_SIGNS,
    REASONING_SIGNS,
    TOOL_SIGNS,
    matching_format,
)
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS, ToolFormat

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AUTO, NONE, CHECKPOINT = "auto", "none", "response_template"


class ChosenFormats(NamedTuple):
    """The formats of a model. `checkpoint` may read calls, reasoning or both."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    checkpoint: CheckpointFormat | HarmonyFormat | None


def choose_formats(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> ChosenFormats:
    """Choose formats. Each parser is `auto`, `none`, `response_template` or a name.

    Raises ConfigError.
    """
    source = tokenizer.template_source
    if (harmony := _harmony_format(tokenizer, tool_parser, reasoning_parser)) is not None:
        return ChosenFormats(None, None, harmony)
    form = _checkpoint_format(tokenizer, tool_parser, reasoning_parser)
    tools: str | None = tool_parser
    reasoning: str | None = reasoning_parser
    if tool_parser in (AUTO, CHECKPOINT):
        is_read = form is not None and form.has_calls
        tools = None if is_read else matching_format(source, TOOL_SIGNS)
    if reasoning_parser in (AUTO, CHECKPOINT):
        reasoning = matching_format(source, REASONING_SIGNS) if form is None else None
    return ChosenFormats(_named_tool_format(tools), _named_reasoning_format(reasoning), form)


def tool_parser_names() -> tuple[str, ...]:
    """Return the names and aliases that `api.tool_parser` takes, except auto and none."""
    return (*TOOL_FORMATS, *HARMONY_NAMES, CHECKPOINT)


def reasoning_parser_names() -> tuple[str, ...]:
    """Return the names and aliases that `api.reasoning_parser` takes, except auto and none."""
    names = (name for form in REASONING_FORMATS for name in (form.name, *form.aliases))
    return (*names, *HARMONY_NAMES, CHECKPOINT)


def _harmony_format(
    tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str
) -> HarmonyFormat | None:
    """Return gpt-oss's format if it is named or recognised. Raises ConfigError."""
    asked = {tool_parser, reasoning_parser}
    is_named = not asked.isdisjoint(HARMONY_NAMES)
    if is_named and not asked <= {AUTO, NONE, *HARMONY_NAMES}:
        raise ConfigError(
            f"api.tool_parser is {tool_parser} and api.reasoning_parser {reasoning_parser}: "
            f"{HARMONY_NAMES[0]} reads both; set both to {HARMONY_NAMES[0]}, auto or none"
        )
    is_recognised = (
        AUTO in asked
        and asked <= {AUTO, NONE}
        and tokenizer.response_template is None
        and matching_format(tokenizer.template_source, HARMONY_SIGNS) is not None
    )
    if not is_named and not is_recognised:
        return None
    return HarmonyFormat(has_calls=tool_parser != NONE, has_reasoning=reasoning_parser != NONE)


def _checkpoint_format(
    tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str
) -> CheckpointFormat | None:
    """Return the checkpoint's own format unless another is named. Raises ConfigError."""
    asked = (tool_parser, reasoning_parser)
    source: Any = tokenizer.response_template
    if CHECKPOINT in asked:
        if source is None:
            raise ConfigError(
                "api.tool_parser or api.reasoning_parser is response_template, but the checkpoint "
                "has none in its tokenizer_config.json; set them to auto, none or a name"
            )
        if not {*asked} <= {AUTO, CHECKPOINT}:
            raise ConfigError(
                f"api.tool_parser is {tool_parser} and api.reasoning_parser {reasoning_parser}: a "
                "response_template reads both; set both to response_template, or neither"
            )
        return CheckpointFormat(source)
    if source is None or {*asked} != {AUTO}:
        return None
    try:
        return CheckpointFormat(source)
    except ConfigError as error:
        logger.warning("parsers: using the chat template's formats instead: %s", error)
        return None


def _named_tool_format(name: str | None) -> ToolFormat | None:
    if name is None or name == NONE:
        return None
    if name not in TOOL_FORMATS:
        raise _unknown("api.tool_parser", name, tool_parser_names())
    return TOOL_FORMATS[name]


def _named_reasoning_format(name: str | None) -> ReasoningFormat | None:
    if name is None or name == NONE:
        return None
    form = reasoning_format(name)
    if form is None:
        raise _unknown("api.reasoning_parser", name, reasoning_parser_names())
    return form


def _unknown(key: str, name: str, names: tuple[str, ...]) -> ConfigError:
    known = ", ".join((AUTO, NONE, *names))
    return ConfigError(f"{key} = {name!r} is unknown; it must be one of {known}")
