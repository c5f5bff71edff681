"""Chat templates: Jinja programs in a checkpoint that render its chats.

Templates are written for transformers' renderer, so this one provides the same settings, language
extensions and variables, and treats missing values alike. They are untrusted programs and run in
Jinja's sandbox, on plain data only, with limits on time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template
from jinja2.meta import find_undeclared_variables

from remora.engine.tokens.template_limits import Allowance, OverRenderLimit, allowance
from remora.engine.tokens.template_sandbox import TemplateSandbox, held_values

# Names of reasoning text used by callers and templates.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# Ends the message to be continued. A template that trims messages removes the space.
OPEN_END = "\ue0f0OPEN-END\ue0f0 "
# Limits of one rendering.
MAX_RENDER_S = 0.5
MAX_RENDER_CHARS = 4 * 2**20


class ChatTemplate:
    """A template with the special tokens that it may use; compiled when first needed.

    max_render_s, max_render_chars:  limits of one rendering
    """

    max_render_s = MAX_RENDER_S
    max_render_chars = MAX_RENDER_CHARS

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the chat as text. Raises the template's exceptions, and ValueError."""
        chat = [_prepared(message) for message in messages]
        last_text = _leave_open(chat[-1]) if continue_final_message else None
        text = self._write(
            {
                **self._special_tokens,
                **_plain(variables),
                "messages": chat,
                "tools": None if tools is None else _plain(list(tools)),
                "documents": None if documents is None else _plain(list(documents)),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return text if last_text is None else _cut_open_end(text, last_text)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the template's variables. Raises the exceptions of malformed templates."""
        return frozenset(find_undeclared_variables(TemplateSandbox().parse(self.source)))

    def _write(self, names: dict[str, Any]) -> str:
        template = self._compiled
        pieces, num_chars = [], 0
        limit = allowance.set(Allowance(self.max_render_s, self.max_render_chars, held_values))
        try:
            for piece in template.generate(names):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self.max_render_chars:
                    raise OverRenderLimit(
                        f"it writes more than {self.max_render_chars} characters",
                        "max_template_chars",
                    )
        except MemoryError:
            raise OverRenderLimit("it needs too much memory", "max_template_chars") from None
        finally:
            allowance.reset(limit)
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> Template:
        return TemplateSandbox().compiled(self.source)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of plain data without None values, with reasoning under every usual name."""
    prepared: dict[str, Any] = _plain({k: v for k, v in message.items() if v is not None})
    named = (prepared[name] for name in REASONING_NAMES if prepared.get(name) is not None)
    reasoning = next(named, None)
    if reasoning is None:
        return prepared
    return {"thinking": reasoning, **prepared, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Copy JSON-like data; other objects have methods that a sandbox does not know."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case tuple():
            return tuple(_plain(item) for item in value)
    raise ValueError(
        f"a chat holds a {type(value).__name__}; only text, numbers, lists and mappings can be "
        "given to a template"
    )


def _leave_open(message: dict[str, Any]) -> str:
    """Append a marker to a message's text in place; return the original text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + OPEN_END
        return content
    for part in reversed(content if isinstance(content, list | tuple) else ()):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + OPEN_END
            return text
    raise ValueError("the final message has no text to continue")


def _cut_open_end(text: str, last_text: str) -> str:
    end = text.rfind(OPEN_END.strip())
    if end < 0 or last_text.strip() not in text:
        raise ValueError("the template does not show the final message as it is")
    was_kept = text.startswith(OPEN_END, end)
    return text[:end] if was_kept else text[:end].rstrip()
