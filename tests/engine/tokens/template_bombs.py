"""Does whatever a template can that could take much memory, in a process that has little.

Run as a program: writes what took more than it may, one a line, and how much was refused.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

from markupsafe import Markup

from remora.engine.tokens.chat_template import ChatTemplate
from remora.engine.tokens.template_limits import Allowance, OverRenderLimit, allowance
from remora.engine.tokens.template_sandbox import TemplateSandbox, held_values

MAX_CHARS = 2**8
SPARE_BYTES = 2**25  # far more than limits of so few characters need, far less than a bomb
HUGE = 10**10
LONG = "a b\t%s\nc" * 2**11


def deep() -> list[Any]:
    """A list of two that has 2**40 items in the end."""
    value: list[Any] = ["x"]
    for _ in range(40):
        value = [value, value]
    return value


SUBJECTS = [
    "a",
    LONG,
    Markup(LONG),
    "%9999999999d",
    "%*d %.*f",
    "{:>9999999999}",
    "{0:{0}}",
    "{0}{a}" * 2**11,
    "%(a)s" * 2**11,
    7,
    -1.5,
    True,
    None,
    [1],
    ["ab"] * 2**11,
    [["ab"] * 2**5] * 2**5,
    {"a": LONG},
    {97: LONG},
    (1, 2),
    range(9999),
    deep(),
]
ARGUMENTS: list[tuple[Any, ...]] = [
    (),
    (HUGE,),
    (-HUGE,),
    (2**30,),
    (LONG,),
    (["ab"] * 2**11,),
    (deep(),),
    (HUGE, "x"),
    (HUGE, 1.5),
    ("a", LONG),
    ("", LONG),
    (LONG, LONG),
    ({"a": LONG},),
    ({97: LONG},),
    (1, True, LONG),
    ("center", HUGE),
]
KEYWORDS = ["a", "attribute", "d", "end", "fill_with", "indent", "length", "linecount", "precision"]
KEYWORDS += ["separators", "slices", "start", "tabsize", "target", "width", "wrapstring"]

# What only the language does.
SOURCES = [
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = X %}{% endfor %}".replace(
        "X", step
    )
    for step in [
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "ns.x * 2",
        "'%s%s' % (ns.x, ns.x)",
        "'{0}{0}'.format(ns.x)",
        "[ns.x, ns.x] | join",
        "(ns.x ~ '%').replace('%', ns.x)",
    ]
] + [
    "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "{% set ns = namespace(x=(1, 2)) %}{% for i in range(64) %}{% set ns.x = (ns.x, ns.x) %}"
    "{% endfor %}{{ {ns.x: 1} }}",
    "{% set ns = namespace(x=9) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(x='a', y='a') %}{% for i in range(64) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}{% set ns = namespace(x='a') %}"
    "{% for i in range(64) %}{% set ns.x = m(ns.x) %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(64) }}",
    "{% set ns = namespace(x=[]) %}{% set t = 'a' * 99999 %}"
    "{% for i in range(99999) %}{% set ns.x = [ns.x, t[1:]] %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set ns.x = [ns.x, [" + "0, " * 999 + "]] %}{% endfor %}",
    "{% block a %}{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}{% endblock %}",
    "{% set x = ['a'] * 999 | map('center', 99999) | list %}",
    "{% set x = (['a'] * 999) | map('center', 99999) | list %}",
    "{{ ('f' * 99999) | int(base=16) }}",
    "{{ 7 ** 99999 }}",
    "{% filter center(9999999999) %}a{% endfilter %}",
    "{{ strftime_now('%Y' * 99999) }}",
    "{{ 'a' * 99999999 }}",
    "{% set x = 99999999 * [1, 2] %}",
    "{{ '%9999999999d' % 1 }}",
]


# What objects of Jinja's hold; texts may have more characters here.
WIDE_CHARS = 2**16
WIDE_SOURCES = [
    *(
        "{% set held = " + held + " %}{{ ([held] * 4000) | " + step + "'" + name + "') }}"
        for held, name in [
            ("namespace(x='a' * 500000)", "x"),
            ("{'n': namespace(x='a' * 500000)}", "n.x"),
            ("cycler('a' * 500000)", "current"),
            ("joiner('a' * 500000)", "sep"),
        ]
        for step in ["join(attribute=", "join('', "]
    ),
    "{% for i in ['a' * 500000, 'a' * 500000] %}"
    "{{ ([loop] * 4000) | join(attribute='nextitem') }}{% endfor %}",
    "{{ ([namespace(x=[1] * 90000)] * 4000) | sum(attribute='x', start=[]) }}",
    "{{ ([[1] * 300] * 300) | sum(start=[]) }}",
]


def main() -> None:
    """Take every step and render every source."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES,) * 2)
    num_refused = 0
    for what, step in chain(_methods(), _filters()):
        token = allowance.set(Allowance(5, MAX_CHARS, held_values))
        try:
            made = step()
            if hasattr(made, "__next__"):
                list(made)
        except OverRenderLimit:
            num_refused += 1
        except MemoryError:
            print("step:", what)
        except Exception:
            pass  # what does not take such arguments takes no memory
        finally:
            allowance.reset(token)
    for sources, max_chars in ((SOURCES, MAX_CHARS), (WIDE_SOURCES, WIDE_CHARS)):
        for source in sources:
            if not _is_refused(source, max_chars):
                print("source:", source)
    print("refused:", num_refused)


def _methods() -> Iterator[tuple[str, Any]]:
    sandbox = TemplateSandbox()
    context = sandbox.from_string("").new_context()
    for subject, args in product(SUBJECTS, ARGUMENTS):
        for name in dir(subject):
            method = sandbox.getattr(subject, name)
            if callable(method):
                yield (
                    f"{type(subject).__name__}.{name}{_shown(args)}",
                    lambda method=method, args=args: sandbox.call(context, method, *args),
                )


def _filters() -> Iterator[tuple[str, Any]]:
    sandbox = TemplateSandbox()
    context = sandbox.from_string("").new_context()
    plain: list[tuple[Any, Any]] = [(args, {}) for args in ARGUMENTS]
    named: list[tuple[Any, Any]] = [
        ((), {name: value}) for name in KEYWORDS for value in (HUGE, LONG)
    ]
    steps = [
        *product(["filter"], sandbox.filters, [sandbox.call_filter], plain + named),
        *product(["test"], sandbox.tests, [sandbox.call_test], plain),
    ]
    for subject, (kind, name, call, (args, kwargs)) in product(SUBJECTS, steps):
        yield (
            f"{type(subject).__name__} {kind} {name}{_shown(args)} {', '.join(kwargs)}",
            lambda call=call, name=name, subject=subject, args=args, kwargs=kwargs: call(
                name, subject, args, kwargs, context=context
            ),
        )


def _shown(args: tuple[Any, ...]) -> str:
    return str([arg if isinstance(arg, int) else type(arg).__name__ for arg in args])


def _is_refused(source: str, max_chars: int) -> bool:
    template = ChatTemplate(source, {})
    template.max_render_chars = max_chars
    try:
        template.render(
            [{"role": "user", "content": "hello"}],
            add_generation_prompt=True,
            continue_final_message=False,
            variables={},
        )
    except OverRenderLimit as error:
        return "memory" not in str(error)
    except (RecursionError, TypeError, ValueError):
        return True
    return False


if __name__ == "__main__":
    main()
