"""The language of chat templates: Jinja in its sandbox, with transformers' extensions.

A template reaches Python by operators, methods, filters, output and collected output, and each
passes an `Allowance` here. One rule estimates the result of an operation: at most the size of its
inputs times the largest of its arguments, numbers by value. Operations for which the rule is too
low or too high are listed below; tests call everything that a template can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from sys import getsizeof
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, markup_join, str_join
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from remora.engine.tokens.template_limits import (
    COLLECTIONS,
    MAX_INT_BITS,
    Allowance,
    OverRenderLimit,
    allowance,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Methods and filters whose result is at most as large as the input, in linear time: of anything,
# and of texts (other inputs are converted to text first).
NO_MORE = _names(
    "abs attr copy d default first float get int items keys last length list map random reject "
    "rejectattr reverse select selectattr values"
)
NO_MORE_TEXT = _names(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper lower lstrip partition "
    "removeprefix removesuffix rstrip safe split splitlines startswith strip swapcase title trim "
    "truncate upper wordcount"
)
# Filters that read a generator; it is read first, to be measured.
READERS = _names("batch groupby join max min slice sort sum unique")
# Methods that create bytes, which no chat contains.
BYTE_MAKERS = frozenset({"encode", "to_bytes"})
# Tests that compare their arguments, and others that do more than inspect them.
COMPARISONS = _names("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne")
OTHER_TESTS = frozenset({"divisibleby", "even", "lower", "odd", "upper"})
# Operations in which a numeric argument is a value, not a count or a width.
VALUE_TAKERS = COMPARISONS | {"dictsort", "groupby", "max", "min", "sort", "sum", "unique"}
# Operations that format with `%`: tests of numbers do so for text.
PERCENT = frozenset({"format", "divisibleby", "even", "odd"})
# Operations of the language that become filters, under names that no template can write.
CONCAT, SLICE, MEASURE, LOOK = "~", "[:]", "comparison", "body"
PLAIN = (str, bytes, int, float, list, tuple, dict)
OWNERS = (*PLAIN, type)
_DICT_NAMES = frozenset(dir(dict))
_TEXT_METHODS = frozenset(
    name for name in dir(str) if not name.startswith(("_", "format")) and name not in BYTE_MAKERS
)
MAX_TIME_FORMAT = 1024
# Of one item of a list literal that contains lists.
ITEM_BYTES = 64
# A width or precision of `%`: a number directly before a conversion.
_WIDTH = re.compile(r"\d+(?=[.*hlLdiouxXeEfFgGcrsa%])")
FLOAT_CHARS = 330


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that templates are compiled for and run in, with an `allowance`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_measured_output,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _limited(name, make) for name, make in self.filters.items()}
        self.filters.update({CONCAT: _concat, SLICE: _cut, MEASURE: _measured, LOOK: _look})
        for name in COMPARISONS | OTHER_TESTS:
            compare: Any = self.tests[name]
            self.tests[name] = _limited(name, compare)
        del self.globals["lipsum"]  # creates text
        self.globals.update(
            raise_exception=_refuse,
            strftime_now=_time_now,
            dict=_DictMaker(),
            namespace=_SafeNamespace,
        )

    def compiled(self, source: str) -> Template:
        """Return a template whose every operation is limited. Raises for malformed templates."""
        program = _Limiter().visit(self.parse(source))
        return self.from_string(program.set_environment(self))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a sum, product, power or formatted text. Raises OverRenderLimit before computing
        it.
        """
        limit = allowance.get()
        if operator == "+":
            limit.expect(_length(left) + _length(right), operator)
        else:
            _check_operands(limit, operator, left, right)
        if isinstance(left, tuple) or isinstance(right, tuple):
            limit.size((left, right), operator)
        result = self.binop_table[operator](left, right)
        limit.take(getsizeof(result))
        return result

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function available to templates. Raises OverRenderLimit."""
        if type(called) is Macro:  # its operations are limited
            return super().call(context, called, *args, **kwargs)
        limit = allowance.get()
        owner = getattr(called, "__self__", None)
        if isinstance(owner, OWNERS):
            args = _checked(limit, called.__name__, owner, args, kwargs)
        return limit.take_made(super().call(context, called, *args, **kwargs))

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a macro, a block or an assignment. Raises OverRenderLimit."""
        limit, kept, num_chars = allowance.get(), [], 0
        for piece in pieces:
            kept.append(piece)
            num_chars += len(piece)
        limit.expect(num_chars, "block")
        text = "".join(kept)
        limit.take(getsizeof(text))
        return text

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or an item; common ones without Jinja's indirections."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may access an attribute."""
        return attr not in BYTE_MAKERS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return limited `str.format` and `format_map`, None for anything else."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        kind: type[str] = type(text)
        formatter = (
            _EscapeFormatter(self, escape=text.escape)
            if isinstance(text, Markup)
            else _Formatter(self)
        )

        def format_text(*args: Any, **kwargs: Any) -> str:
            return kind(formatter.vformat(text, args, kwargs))

        def format_map(mapping: Mapping[str, Any]) -> str:
            return kind(formatter.vformat(text, (), mapping))

        return format_map if value.__name__ == "format_map" else format_text


def _limited(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that is measured before and after."""
    start = 1 if hasattr(make, "jinja_pass_arg") else 0  # the context, before the filtered value

    @wraps(make)  # with Jinja's markers
    def counted(*args: Any, **kwargs: Any) -> Any:
        return allowance.get().take_made(make(*args, **kwargs))

    @wraps(make)
    def limited(*args: Any, **kwargs: Any) -> Any:
        limit = allowance.get()
        subject = args[start]
        if name in READERS and isinstance(subject, Iterator):
            subject = limit.take_made(list(subject))
        given = _checked(limit, name, subject, args[start + 1 :], kwargs)
        return limit.take_made(make(*args[:start], subject, *given, **kwargs))

    return counted if name in NO_MORE else limited


def _checked(
    limit: Allowance, name: str, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Refuse an operation that could create too much; return its arguments, generators read."""
    if name in NO_MORE or (name in NO_MORE_TEXT and isinstance(subject, str)):
        return args
    if name in READERS:
        args = tuple(
            limit.take_made(list(arg)) if isinstance(arg, Iterator) else arg for arg in args
        )
    given = [*args, *kwargs.values()]
    if name in PERCENT:
        limit.expect(limit.size(subject, name), name)
        num_chars = _percent_chars(limit, str(subject), kwargs or args)
    elif name in RECKONERS:
        num_chars = RECKONERS[name](limit, subject, given)
    else:
        largest = max((_weight(limit, name, arg) for arg in given), default=0)
        num_chars = (1 + limit.size(subject, name)) * (1 + largest)
    limit.expect(num_chars, name)
    return args


def _replace_chars(limit: Allowance, subject: Any, given: list[Any]) -> int:
    size = limit.size(subject, "replace")
    old, new, *_ = (*given, "", "")
    if isinstance(subject, str) and isinstance(old, str) and isinstance(new, str):
        return size + subject.count(old) * len(new)
    return (1 + size) * (1 + sum(limit.size(each, "replace") for each in given))


def _join_chars(limit: Allowance, subject: Any, given: list[Any]) -> int:
    """Estimate text between the items, and at each end; for any argument order.

    Items are first in the filter, last in the method of text.
    """
    if isinstance(subject, str) and given and not isinstance(given[0], str):
        subject, given = given[0], [subject]
    between = sum(limit.size(each, "join") for each in given)
    return limit.size(subject, "join") + (1 + _length(subject)) * between


def _wrapped_chars(limit: Allowance, subject: Any, given: list[Any]) -> int:
    """Estimate text after each character; widths add nothing."""
    size = limit.size(subject, "wordwrap")
    after = sum(limit.size(each, "wordwrap") for each in given if not isinstance(each, int))
    return (1 + size) * (2 + after)


def _summed_chars(limit: Allowance, subject: Any, given: list[Any]) -> int:
    """Estimate a list that is copied with every item; numbers add nothing."""
    size = limit.size(subject, "sum") + sum(limit.size(each, "sum") for each in given)
    is_copied = any(isinstance(each, COLLECTIONS) for each in given)
    return size * (1 + len(subject)) if is_copied and isinstance(subject, COLLECTIONS) else size


# Operations for which the rule is too high.
RECKONERS: dict[str, Callable[[Allowance, Any, list[Any]], int]] = {
    "join": _join_chars,
    "replace": _replace_chars,
    "sum": _summed_chars,
    "wordwrap": _wrapped_chars,
}


def held_values(item: Any) -> Iterable[Any]:
    """Return the attributes of a Jinja object that a filter can read."""
    if isinstance(item, Namespace):
        values: dict[str, Any] = object.__getattribute__(item, "_Namespace__attrs")
        return values.values()
    if isinstance(item, Cycler):
        return item.items
    if isinstance(item, Joiner):
        return (item.sep,)
    return (item.previtem, item.nextitem) if isinstance(item, LoopContext) else ()


def _weight(limit: Allowance, name: str, arg: Any) -> int:
    if isinstance(arg, int) and name not in VALUE_TAKERS:
        return abs(arg)
    return limit.size(arg, name)


def _check_operands(limit: Allowance, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        num_bits = 0
        if operator == "**":
            num_bits = left.bit_length() * right
        elif operator == "*":
            num_bits = left.bit_length() + right.bit_length()
        if num_bits > MAX_INT_BITS:
            raise OverRenderLimit(
                f"{operator!r} would create a number of more than {MAX_INT_BITS} bits",
                "max_template_chars",
            )
    elif operator == "%" and isinstance(left, str):
        limit.expect(_percent_chars(limit, left, right), operator)
    elif operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(other, int):
                limit.expect(_length(one) * other, operator)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 1


def _percent_chars(limit: Allowance, text: str, values: Any) -> int:
    """Estimate `text % values`: its widths, and each value as often as it may appear."""
    num_fields = text.count("%")
    widths = sum(min(int(width[:20]), 10**20) for width in _WIDTH.findall(text))
    if "*" in text and isinstance(values, tuple):
        widths += sum(abs(value) for value in values if isinstance(value, int))
    num_shown = num_fields if isinstance(values, dict) else 1
    shown = num_shown * limit.size(values, "%")
    return len(text) + widths + shown + num_fields * FLOAT_CHARS


class _Formatter(SandboxedFormatter):
    """`str.format`, each field of which is an operation."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value, used = super().get_field(field_name, args, kwargs)
        limit = allowance.get()
        limit.expect(limit.size(value, "format"), "format")
        return value, used

    def format_field(self, value: Any, format_spec: str) -> str:
        limit = allowance.get()
        widths = sum(int(width[:20]) for width in re.findall(r"\d+", format_spec))
        limit.expect(widths, "format")
        text: str = super().format_field(value, format_spec)
        limit.take(getsizeof(text))
        return text


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """The same for text marked as safe."""


class _Limiter(NodeTransformer):
    """Converts operations that Jinja does not intercept to filters."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *others = node.nodes
        return _filter(CONCAT, first, *others)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(SLICE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Measure compared lists: one that contains another repeatedly is compared as often."""
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if sum(not isinstance(side, nodes.Const) for side in sides) > 1:
            node.expr = _filter(MEASURE, node.expr)
            for operand in node.ops:
                operand.expr = _filter(MEASURE, operand.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Measure tuples when they are created: as keys they are read at every lookup."""
        self.generic_visit(node)
        return _filter(MEASURE, node) if node.ctx == "load" else node

    def _with_look(self, node: Any) -> nodes.Node:
        """Charge each iteration for the list literals in the loop's body."""
        written = node.find_all((nodes.List, nodes.Tuple, nodes.Dict))
        num_items = sum(1 + len(made.items) for made in written)
        body: nodes.Node = self.generic_visit(node)
        look = _filter(LOOK, nodes.Const(ITEM_BYTES * num_items))
        node.body.insert(0, nodes.ExprStmt(look, lineno=node.lineno))
        return body

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _with_look


def _filter(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


@pass_eval_context
def _concat(eval_ctx: EvalContext, *values: Any) -> str:
    limit = allowance.get()
    limit.expect(sum(limit.size(value, CONCAT) for value in values), CONCAT)
    text = markup_join(values) if eval_ctx.autoescape else str_join(values)
    limit.take(getsizeof(text))
    return text


def _cut(value: Any) -> Any:
    allowance.get().take(getsizeof(value))
    return value


def _measured(value: Any) -> Any:
    if isinstance(value, COLLECTIONS):
        allowance.get().size(value, MEASURE)
    return value


@pass_context
def _look(context: Context, num_bytes: int) -> None:
    allowance.get().take(num_bytes)


@pass_context
def _measured_output(context: Context, value: Any) -> Any:
    if isinstance(value, COLLECTIONS):
        limit = allowance.get()
        limit.take(limit.size(value, "output"))
    return value


class _GenerationBlock(Extension):
    """`{% generation %}`: marks assistant output for training; here it only renders it."""

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
    if len(format) > MAX_TIME_FORMAT:  # strftime allocates memory by the format's length
        raise ValueError(
            f"a format of time has {len(format)} characters; at most {MAX_TIME_FORMAT} are allowed"
        )
    return datetime.now().strftime(format)


class _DictMaker:
    """`dict(...)` without the class, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Create a dict of keys with one value, as `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """`namespace(...)` without names of Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # a template may name an attribute "self"
        values = dict(*given, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # its content may be larger than the allowed output


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")
