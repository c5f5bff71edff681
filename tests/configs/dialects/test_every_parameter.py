"""Each parameter, set to something else than its default: it takes effect, or a line
says why not, or it is refused. None is passed over."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import SYSTEMS, Parameter, System, catalogue
from remora.configs.dialects.coverage import counts_table, coverage, parameters_page
from remora.configs.dialects.refusals import REFUSALS
from remora.configs.dialects.resolve import resolve
from remora.configs.dialects.rules import Rule
from remora.configs.dialects.translate import State, translate
from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from tests.configs.dialects.samples import COMPANIONS, values

ROOT = Path(__file__).parents[3]
MODEL = {
    "sglang": {"--model-path": "/model"},
    "lightllm": {"--model_dir": "/model"},
    "rtp_llm": {"--checkpoint-path": "/model"},
    "vllm": {"--model": "/model"},
    "ray_serve_llm": {
        "model_loading_config.model_id": "m",
        "model_loading_config.model_source": "/model",
    },
}
ROWS = {(row.system, row.name): row for row in coverage()}
PARAMETERS = [p for system in SYSTEMS for p in catalogue(system).values()]
# State on the page -> what `remora config check` and the start may report of single values.
SHOWN_AS = {
    State.EXACT: {State.EXACT, State.NO_EFFECT},
    State.APPROXIMATE: set(State),
    State.NO_EFFECT: {State.NO_EFFECT},
    State.REFUSED: {State.NO_EFFECT},
}
EFFECTIVE = [
    p
    for p in PARAMETERS
    if (row := ROWS.get((p.system, p.name))) is not None
    and row.state in (State.EXACT, State.APPROXIMATE)
    and p.name != "--config"  # of command lines: test_command_line.py
]


@pytest.fixture(autouse=True)
def _first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST_ALLOWED_TOKENS", "1,2")


def label(parameter: Parameter) -> str:
    return f"{parameter.system}:{parameter.name}"


def rule_of(parameter: Parameter, name: str) -> Rule:
    return DIALECTS[parameter.system].rule(catalogue(parameter.system)[name])


def test_every_parameter_is_counted_once() -> None:
    counts = [len([row for row in ROWS.values() if row.system == system]) for system in SYSTEMS]
    assert counts == [250, 88, 92, 41, 320, 53]


@pytest.mark.parametrize("parameter", PARAMETERS, ids=label)
def test_a_value_has_a_line_or_is_refused_by_name(parameter: Parameter) -> None:
    for value in values(parameter):
        given = {**COMPANIONS.get((parameter.system, parameter.name), {}), parameter.name: value}
        written = DIALECTS[parameter.system].flatten(given)
        try:
            translation = translate(
                DIALECTS[parameter.system], {name: value for name, (_, value) in written.items()}
            )
        except ConfigError as error:
            message = str(error)
        else:
            message = ""
        if message:
            assert parameter.name in message
            assert "\n" not in message
            continue
        (line,) = [line for line in translation.lines if line.name.startswith(parameter.name)]
        row = ROWS.get((parameter.system, parameter.name))
        if row is not None and line.name == parameter.name:
            assert line.state in SHOWN_AS[row.state], row
        known = {key for name in written for key in rule_of(parameter, name).keys}
        if line.state is State.NO_EFFECT:
            assert line.text, "why it is harmless is not said"
        else:
            assert line.settings.keys() <= known


@pytest.mark.parametrize("parameter", EFFECTIVE, ids=label)
def test_what_takes_effect_changes_the_configuration(parameter: Parameter) -> None:
    key = (parameter.system, parameter.name)
    base = {**MODEL.get(parameter.system, {}), **COMPANIONS.get(key, {})}
    before = None
    with contextlib.suppress(ConfigError):  # its companion may need it
        before = configured(parameter.system, base)
    changed = []
    for value in values(parameter):
        with contextlib.suppress(ConfigError):  # of some parameters some values are refused
            changed.append(configured(parameter.system, {**base, parameter.name: value}))
    assert changed, "every value was refused"
    if DIALECTS[parameter.system].rule(parameter).keys:
        assert any(after != before for after in changed)


def configured(system: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """Return the configuration that `given` means, and host and port."""
    args = {"dialect": system, "args": given}
    if system == "backend":
        args["model"] = {"path": "/model"}
    return parse_args(args), resolve(args).http


def test_the_page_lists_the_choices_that_are_accepted() -> None:
    expected: tuple[tuple[System, str, str], ...] = (
        ("sglang", "--tokenizer-mode", "auto"),
        ("sglang", "--speculative-algorithm", "EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM"),
        ("sglang", "--node-rank", "0"),
        ("sglang", "--mm-attention-backend", "-"),
        ("lightllm", "--long_truncation_mode", "head, center"),
        ("rtp_llm", "--tp-size", "whole number"),
    )
    for system, name, accepts in expected:
        assert ROWS[system, name].accepts == accepts
        assert f"| `{name}` | {accepts} | " in parameters_page()


def test_what_sets_no_key_is_not_exact() -> None:
    without_keys = [
        label(parameter)
        for parameter in PARAMETERS
        if not DIALECTS[parameter.system].rule(parameter).keys
        and (row := ROWS.get((parameter.system, parameter.name))) is not None
        and row.state is State.EXACT
    ]
    assert without_keys == []


def test_what_takes_effect_has_a_test_that_observes_it() -> None:
    unobserved = [
        f"{row.system} {row.name}"
        for row in ROWS.values()
        if row.state in (State.EXACT, State.APPROXIMATE) and row.test is None
    ]
    assert unobserved == []


def test_the_tests_named_exist() -> None:
    for row in ROWS.values():
        if row.test is not None:
            file, name = row.test.split("::")
            assert f"def {name}(" in (ROOT / file).read_text(), row


def test_the_page_of_parameters_is_the_one_generated() -> None:
    assert (ROOT / "docs" / "parameters.md").read_text() == parameters_page(), (
        "run: remora config coverage --format markdown > docs/parameters.md"
    )


def test_the_readme_shows_the_counts() -> None:
    assert counts_table(list(ROWS.values())) in (ROOT / "README.md").read_text(), (
        "the table is the end of `remora config coverage`"
    )


def test_each_common_reason_is_some_parameter_s() -> None:
    used = set()
    for parameter in PARAMETERS:
        if parameter.name not in DIALECTS[parameter.system].rules:
            fitting = [name for name in REFUSALS if parameter.capability.startswith(name)]
            used.add(max(fitting, key=len))
    assert set(REFUSALS) - used == set()
