"""From messages to text, by the chat template that comes with a model.

Whatever a template raises on a caller's messages is the caller's InvalidRequest, with the words of
the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from remora.configs.errors import InvalidRequest
from remora.engine.tokens.chat_template import ChatTemplate

# Arguments of the renderer itself: a caller's template variables may not replace them.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# What a template, which is plain Python underneath, may run into on messages it does not expect.
TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def render_chat(
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
) -> str:
    """Return the conversation as the template writes it. Raises InvalidRequest."""
    _check(messages, template_kwargs)
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are both set; a final message that "
            "is continued leaves no place for a new one. Set one of them to false.",
            "continue_final_message",
        )
    if template is None:
        raise InvalidRequest(
            "This model has no chat template. Send a finished prompt to the completions API.",
            "messages",
        )
    try:
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template_kwargs,
        )
    except TEMPLATE_FAILURES as error:
        raise InvalidRequest(
            f"The model's chat template refuses these messages: {str(error)[:200]}", "messages"
        ) from error


def _check(messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> None:
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed.", "messages")
    for place, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(
                f"messages[{place}] has the role {role!r}; a text such as 'user' is needed.",
                "messages",
            )
    reserved = sorted(RESERVED_KWARGS.intersection(template_kwargs))
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {reserved[0]!r}: it is an argument of the renderer, "
            "not a variable of the template.",
            "chat_template_kwargs",
        )
