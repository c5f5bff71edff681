"""Whether and how much the model thinks, as a chat body says it, in the template's own words."""

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
        message = f"{EFFORT}: this model's chat template has no levels of reasoning effort."
        raise unsupported(EFFORT, message)
    return {**switches, **given}


def _check_documents(tokenizer: Tokenizer, body: TemplateBody) -> None:
    if body.documents and "documents" not in tokenizer.template_variables:
        raise unsupported("documents", "documents: this model's chat template takes none.")


def check_effort(server: ServerState, body: ChatBody, prompt: str) -> None:
    """Raise InvalidRequest if reasoning is to be switched off and cannot be."""
    if body.reasoning_effort != EFFORT_OFF:
        return
    formats, continues = server.formats, bool(body.continue_final_message)
    has_switch = not server.tokenizer.template_variables.isdisjoint((EFFORT, *SWITCHES))
    may_think = not has_switch and formats.open_reasoning(prompt, continues=continues) != prompt
    if may_think or formats.reasoning_budget(prompt, continues=continues) is not None:
        raise unsupported(EFFORT, f"{EFFORT}: this model's reasoning cannot be switched off.")


def opened(formats: ReplyFormats, body: ChatBody, prompt: str, *, is_held: bool) -> str:
    """Return the prompt with reasoning opened, where the request depends on it.

    is_held:  whether a grammar holds for what follows the reasoning

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
