"""Chat templates: programs in Jinja's language that come with a checkpoint and write its chats.

Templates are written for transformers' renderer, so this one gives them the same: its settings and
extensions of the language, its names beside the messages, its ways with what callers leave out.
They are strangers' programs and run in Jinja's sandbox, over plain data only, for a limited time:
every loop looks at the clock, and what comes out is counted as it comes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Names that callers and templates have given to what a model thought before it answered.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# Ends the message that is to be continued. A template that trims messages takes the space away.
OPEN_END = "\ue0f0OPEN-END\ue0f0 "
# Of one rendering. Time is the thread's own: waiting for a busy machine costs nobody an answer.
MAX_RENDER_S = 0.5
MAX_RENDER_CHARS = 4 * 2**20
MAX_POWER_BITS = 4096

# When the rendering of this thread is given up, and after how long.
_time: ContextVar[tuple[float, float]] = ContextVar("_time")


class OverRenderLimit(ValueError):
    """A rendering that was given up. `limit` is the key of the configuration."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class ChatTemplate:
    """A template with the special tokens that it may name; compiled when first needed.

    max_render_s, max_render_chars:  of one rendering
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
        """Return the chat as text. Raises whatever the template raises; ValueError of its own."""
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
        """Names that the template looks for. Raises what a malformed template raises."""
        return frozenset(find_undeclared_variables(_Environment().parse(self.source)))

    def _write(self, names: dict[str, Any]) -> str:
        template = self._compiled
        pieces, num_chars = [], 0
        limit = _time.set((time.thread_time() + self.max_render_s, self.max_render_s))
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
            _time.reset(limit)
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> Template:
        environment = _Environment()
        program = environment.parse(self.source)
        for loop in program.find_all(nodes.For):
            look = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(look, lineno=loop.lineno))
        return environment.from_string(program)


class _Environment(ImmutableSandboxedEnvironment):
    """What templates run in."""

    # What makes much of little, in one step that no clock is looked at in.
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_refuse,
            strftime_now=_time_now,
            dict=_DictMaker(),
            namespace=_SafeNamespace,
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power. Raises ValueError for one that is too long to be written."""
        for one, other in ((left, right), (right, left)):
            if not isinstance(other, int):
                continue
            is_power = operator == "**" and isinstance(one, int) and other is right
            if is_power and one.bit_length() * other > MAX_POWER_BITS:
                raise OverRenderLimit("it raises to too high a power", "max_template_chars")
            if isinstance(one, str | list | tuple) and len(one) * other > MAX_RENDER_CHARS:
                raise OverRenderLimit("it repeats something too often", "max_template_chars")
        return super().call_binop(context, operator, left, right)

    def check_time(self) -> None:
        """Raise ValueError when the time of a rendering is over."""
        deadline, allowed_s = _time.get()
        if time.thread_time() > deadline:
            raise OverRenderLimit(f"it takes more than {allowed_s:g} s", "template_timeout_s")


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of plain data without what is None, its reasoning under every usual name."""
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
    """Mark the end of a message's text, which is changed; returns the text as it was."""
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


class _GenerationBlock(Extension):
    """`{% generation %}`: marks, for training, what the assistant wrote; here it only shows it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_show", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _show(self, caller: Macro) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a model: Jinja's own filter writes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _time_now(format: str) -> str:
    return datetime.now().strftime(format)


class _DictMaker:
    """`dict(...)` without the class, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Make a dict of keys with one value, as `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """`namespace(...)` that keeps no names of Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # a template may well call an attribute "self"
        values = dict(*given, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")
