"""Whether and how much the model thinks, as a chat body says it, in the template's own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.errors import unsupported

if TYPE_CHECKING:
    from remora.deployments.http.openai_bodies import ChatBody, TemplateBody
    from remora.deployments.parsers.replies import ReplyFormats
    from remora.engine.tokens.tokenizer import Tokenizer
    from remora.engine.types import Thinking

EFFORT, EFFORT_OFF = "reasoning_effort", "none"
# Names by which templates let thought be switched on and off.
SWITCHES = ("enable_thinking", "thinking")


def template_variables(tokenizer: Tokenizer, body: TemplateBody) -> Mapping[str, Any]:
    """Return the template's variables; an effort becomes what the template understands of it.

    A template that knows degrees gets the degree. One that knows only on and off thinks with any
    effort but `none`. Raises InvalidRequest where an effort would change nothing.
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
        return {EFFORT: effort, **switches, **given}
    if not switches and effort != EFFORT_OFF:
        message = f"{EFFORT}: this model's chat template knows no degrees of thought."
        raise unsupported(EFFORT, message)
    return {**switches, **given}


def _check_documents(tokenizer: Tokenizer, body: TemplateBody) -> None:
    if body.documents and "documents" not in tokenizer.template_variables:
        raise unsupported("documents", "documents: this model's chat template takes none.")


def thinking_of(formats: ReplyFormats, body: ChatBody, prompt: str) -> Thinking | None:
    """Return the thought that a reply to the prompt begins with, if it does.

    Raises InvalidRequest where it was to be switched off, or limited, and cannot be.
    """
    thinking = formats.thinking(prompt, budget=body.thinking_token_budget)
    if thinking is not None and body.reasoning_effort == EFFORT_OFF:
        raise unsupported(EFFORT, f"{EFFORT}: this model's thought cannot be switched off.")
    if thinking is None and body.thinking_token_budget is not None:
        message = "thinking_token_budget: the reply does not begin within a thought."
        raise unsupported("thinking_token_budget", message)
    return thinking
