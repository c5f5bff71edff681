"""What a template does stays within its room, and ordinary templates notice nothing of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from jinja2.exceptions import SecurityError

from tests.engine.tokens.test_chat_template import TOOLS, USER, both, render


def test_nothing_that_a_template_can_do_takes_more_memory_than_it_may() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.tokens.template_bombs"],
        check=True,
        capture_output=True,
        text=True,
    )

    *taken, refused = done.stdout.splitlines()
    assert taken == []
    assert int(refused.removeprefix("refused: ")) > 5000


@pytest.mark.parametrize(
    "step",
    [
        "'a' ~ 1 ~ [1.5, none] ~ missing",
        "('a' | safe) ~ '<'",
        "'12345678'[1:-1:2] ~ messages[0:1]",
        "messages == messages[:] and messages[0] != messages[-1]",
        "'%s|%5.2f|%-4d|%%' % ('a', 1, 1700000000)",
        "'%(a)s %(b)r' % {'a': 1, 'b': 'x'}",
        "'%s at %d' | format('x', 1700000000)",
        "'{0[0].role}|{1}'.format(messages, 'b')",
        "'{:>5}|{a!r:*^9}|{:,}'.format('b', 1700000000, a='c')",
        "('<{a}>' | safe).format(a='<')",
        "'{a[0]} {b}'.format_map({'a': [1], 'b': '<'})",
        "messages[0].content.replace('is', 'was').center(70, '*') | indent(3, first=true)",
        "tools | tojson(indent=4) ~ tools | tojson ~ tools | string",
        "tools | map(attribute='function.name') | join(', ')",
        "', '.join(tools | map(attribute='function.name'))",
        "[3, 1700000000] | max ~ [2, 1] | sort ~ [[1]] | sum(start=[]) ~ [1] | sum(start=9**9)",
        "1700000000 is gt 5 and 5 is lt 1700000000 and 5 is in [5] and 6 is divisibleby 3",
        "missing | default(1700000000) ~ ('7' | int(1700000000)) ~ 2.345 | round(2)",
        "((1, 'b') + (2,)) ~ ([1] * 2 + [3]) ~ {'a': (1, 2)}",
        "range(7) | batch(3, 0) | list ~ range(7) | slice(3) | map('list') | list",
        "messages | selectattr('role', 'equalto', 'user') | list | length ~ messages.x is defined",
        "messages[0].items() | list ~ messages[0] | dictsort ~ messages[0].keys() | list",
        "'a b' | wordwrap(1) ~ 'x' | urlencode ~ {'a': 'b'} | xmlattr ~ 'http://a.b' | urlize",
        "messages | pprint ~ 'a,b'.split(',') ~ 'a-b'.partition('-') ~ 7.5.is_integer()",
    ],
)
def test_ordinary_steps_come_out_as_under_transformers(step: str) -> None:
    ours, theirs = both("{{ " + step + " }}", [USER, {"role": "assistant"}], tools=TOOLS)

    assert ours == theirs


@pytest.mark.parametrize(
    "step", ["messages | map(attribute='content') | join(between)", "between.join(texts)"]
)
def test_long_chats_are_joined(step: str) -> None:
    chat = [{"role": "user", "content": "abc" * 1000}] * 300
    source = (
        "{% set between = '-' * 44 %}{% set texts = messages | map(attribute='content') | list %}"
    )

    ours, theirs = both(source + "{{ " + step + " }}", chat)

    assert ours == theirs
    assert len(ours) > 900_000


@pytest.mark.parametrize(
    "source",
    [
        "{% autoescape true %}{{ '<' ~ '>' }}{{ messages }}{% endautoescape %}",
        "{% set a, b = 1, (2, 3) %}{{ a }}{{ b }}{% for c, d in [(1, 2)] %}{{ c + d }}{% endfor %}",
        "{% filter upper | center(9) %}abc{% endfilter %}|{% set x | trim %} y {% endset %}{{ x }}",
        "{% block a %}{{ messages[0].role }}{% endblock %}{{ self.a() }}",
        "{% macro m(t) %}<{{ t }}{{ caller(1) if caller else '' }}>{% endmacro %}{{ m(m('a')) }}"
        "{% call(n) m('b') %}{{ n }}{% for i in range(n) %}{{ i }}{% endfor %}{% endcall %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    ],
)
def test_other_parts_of_the_language_come_out_as_under_transformers(source: str) -> None:
    ours, theirs = both(source, [USER])

    assert ours == theirs


@pytest.mark.parametrize("made", ["'a'.encode('utf-32')", "(5).to_bytes(10 ** 10)"])
def test_templates_make_no_bytes(made: str) -> None:
    with pytest.raises(SecurityError, match="unsafe"):
        render("{{ " + made + " }}", [USER])
