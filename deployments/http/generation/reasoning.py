"""Reasoning switches and effort of a chat body, as variables of the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported

if TYPE_CHECKING:
    from remora.deployments.http.generation.bodies import ChatBody, TemplateBody
    from remora.deployments.http.generation.server_state import ServerState
    from remora.deployments.parsers.replies import ReplyFormats
    from remora.engine.tokens.tokenizer import Tokenizer

EFFORT, EFFORT_OFF = "reasoning_effort", "none"
# Template variables that switch reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")


def template_variables(
    tokenizer: Tokenizer, body: TemplateBody, efforts: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the variables of the template, with the effort in the form that it supports.

    efforts:  the template's names of efforts that requests call otherwise

    A template with effort levels gets the level. A template with only a switch reasons at any
    effort except `none`. Raises InvalidRequest if an effort would have no effect.
    """
    given = body.chat_template_kwargs or {}
    _check_documents(tokenizer, body)
    effort = body.reasoning_effort
    if effort is None:
        return given
    known = tokenizer.template_variables
    switches = {name: effort != EFFORT_OFF for name in SWITCHES if name in known}
    for name, is_on in switches.items():
        if given.get(name, is_on) is not is_on:
            message = f"{EFFORT} {effort} contradicts chat_template_kwargs.{name}."
            raise InvalidRequest(message, EFFORT)
    if EFFORT in known and (effort != EFFORT_OFF or not switches):
        return {EFFORT: efforts.get(effort, effort), **switches, **given}
    if not switches and effort != EFFORT_OFF:
        message = f"{EFFORT}: this model's chat template has no levels of reasoning effort."
        raise unsupported(EFFORT, message)
    return {**switches, **given}


def _check_documents(tokenizer: Tokenizer, body: TemplateBody) -> None:
    if body.documents and "documents" not in tokenizer.template_variables:
        raise unsupported("documents", "documents: this model's chat template takes none.")


def check_effort(server: ServerState, body: ChatBody, prompt: str) -> None:
    """Raise InvalidRequest if reasoning should be off but cannot be switched off."""
    if body.reasoning_effort != EFFORT_OFF:
        return
    formats, continues = server.formats, bool(body.continue_final_message)
    has_switch = not server.tokenizer.template_variables.isdisjoint((EFFORT, *SWITCHES))
    may_think = not has_switch and formats.open_reasoning(prompt, continues=continues) != prompt
    if may_think or formats.reasoning_budget(prompt, continues=continues) is not None:
        raise unsupported(EFFORT, f"{EFFORT}: this model's reasoning cannot be switched off.")


def opened(formats: ReplyFormats, body: ChatBody, prompt: str, *, is_held: bool) -> str:
    """Return the prompt, with reasoning opened if the request depends on it.

    is_held:  whether a grammar constrains the text after the reasoning

    Raises InvalidRequest for a reasoning budget of a model without reasoning.
    """
    budget, continues = body.thinking_token_budget, bool(body.continue_final_message)
    if budget is None and not is_held:
        return prompt
    prompt = formats.open_reasoning(prompt, continues=continues)
    if budget is not None and formats.reasoning_format_name is None:
        message = "thinking_token_budget: this model is not known to think before it answers."
        raise unsupported("thinking_token_budget", message)
    return prompt
