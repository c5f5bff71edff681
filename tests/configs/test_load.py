"""Files and `args` into a ServeConfig; every fault named with place, key, value and reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import ConfigError
from remora.configs.load import IMPORT_PATH, ServeFile, load_serve_file, parse_args
from remora.configs.positions import parse_yaml
from remora.configs.schema import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
HEAD = f"""\
http_options:
  port: 8123
applications:
  - name: one
    import_path: {IMPORT_PATH}
    args:
"""
MODEL = "      model:\n        path: some/folder\n"


def make_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, text: str) -> ServeFile:
    return load_serve_file(make_file(tmp_path, text))


def load_error(tmp_path: Path, text: str) -> str:
    path = make_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_serve_file(path)
    return str(caught.value).replace(f"{path}:", "@")


def args_error(args: dict[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(args)
    return str(caught.value)


def with_engine(**engine: Any) -> dict[str, Any]:
    return {"model": {"path": "x"}, "engine": engine}


def test_the_shipped_file_serves_the_built_in_model_on_this_machine_only() -> None:
    served = load_serve_file(ROOT / "configs" / "smollm2.yaml")

    assert served.config.model.path == "smollm2-135m-instruct"
    assert (served.host, served.port, served.route_prefix) == ("127.0.0.1", 8000, "/")
    assert served.written == {"model.path": served.written["model.path"]}


def test_a_file_gives_serve_options_config_and_the_lines_of_written_keys(tmp_path: Path) -> None:
    served = load(tmp_path, HEAD + MODEL + "      engine: {page_size: 8}\n")

    assert (served.app_name, served.port, served.host) == ("one", 8123, "127.0.0.1")
    assert served.config.engine.page_size == 8
    assert served.written == {"model.path": "line 8", "engine.page_size": "line 9"}
    assert served.raw["applications"][0]["import_path"] == IMPORT_PATH


def test_a_valid_config_has_sizes_in_bytes_and_is_immutable() -> None:
    config = parse_args(with_engine(kv_memory="1.5GiB") | {"api": {"max_body_bytes": 1000}})

    assert config.engine.kv_memory == 3 * 2**29
    assert config.api.max_body_bytes == 1000
    with pytest.raises(ValueError, match="frozen"):
        config.engine = config.engine


SECTIONS = {
    name: list(ServeConfig.model_fields[name].annotation.model_fields)  # type: ignore[union-attr]
    for name in ServeConfig.model_fields
}
KEYS = [(section, key) for section, keys in SECTIONS.items() for key in keys]
AMBIGUOUS = {"p_size", "p_psize", "top_"}  # these could be either of two keys


def typos(key: str) -> set[str]:
    swapped = key[0] + key[2] + key[1] + key[3:]
    missing = key[:-1], key[1:], key[:2] + key[3:]
    made = {*missing, swapped, key + "s", key.replace("_", "-") + "_", key.upper()}
    return made - AMBIGUOUS - {key}


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_a_misspelt_key_is_named_with_its_value_and_the_key_it_looks_like(
    section: str, key: str
) -> None:
    for typo in typos(key):
        args: dict[str, Any] = {"model": {"path": "x"}}
        args.setdefault(section, {})[typo] = 7

        message = args_error(args)

        assert f"{section}.{typo} = 7: unknown key; did you mean {section}.{key}?" in message


JSON_FORM = ServeConfig.model_json_schema()
WRONG_VALUES: list[Any] = ["soon", -1, 0.5, True, None, [], {}, [1], {"a": 1}, float("nan"), 10**30]


def accepts(section: str, key: str, value: Any) -> bool:
    """Whether the schema's own JSON form, written down apart from the messages, takes a value."""
    schema = JSON_FORM["$defs"]
    name = ServeConfig.model_fields[section].annotation.__name__  # type: ignore[union-attr]
    return any(matches(choice, value) for choice in flatten(schema[name]["properties"][key]))


def wrong_values(section: str, key: str) -> list[Any]:
    return [value for value in WRONG_VALUES if not accepts(section, key, value)]


def flatten(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [leaf for part in schema.get("anyOf", []) for leaf in flatten(part)] or [schema]


def matches(schema: dict[str, Any], value: Any) -> bool:
    kinds: dict[str, Any] = {"integer": int, "number": (int, float), "string": str, "boolean": bool}
    kinds |= {"array": list, "object": dict}
    if "$ref" in schema:  # a section within a section, whose own keys have tests of their own
        return isinstance(value, dict)
    kind = schema.get("type", "string")
    if kind == "null":
        return value is None
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if "enum" in schema:
        return value in schema["enum"]
    if kind == "object":
        of = schema["additionalProperties"]
        return of is True or all(matches(of, part) for part in value.values())
    if kind == "array":
        return bool(len(value) >= schema.get("minItems", 0))
    if kind in {"integer", "number"}:
        low, high = schema.get("minimum", 0), schema.get("maximum", 2**50)
        return bool(low <= value <= high and value > schema.get("exclusiveMinimum", -math.inf))
    return "pattern" not in schema


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_a_wrong_value_is_named_with_its_key_and_what_would_be_right(
    section: str, key: str
) -> None:
    for value in wrong_values(section, key):
        args: dict[str, Any] = {"model": {"path": "x"}}
        args.setdefault(section, {})[key] = value

        message = args_error(args)

        place, _, why = message.partition(": ")
        assert place.startswith((f"{section}.{key} = ", f"{section}.{key}."))
        assert any(word in why for word in ("expected", "must be", "finite", "power of two"))
        assert "\n" not in message


def test_there_are_thousands_of_wrong_configurations() -> None:
    assert sum(len(typos(key)) + len(wrong_values(section, key)) for section, key in KEYS) > 4000


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("page_size: 15", "@9:20: engine.page_size = 15: must be a power of two"),
        ("device: gpu", "@9:17: engine.device = 'gpu': must be one of auto, cpu or cuda"),
        ("pagesize: 16", "@9:9: engine.pagesize = 16: unknown key; did you mean engine.page_size?"),
        (
            "num_threads: '3'",
            "@9:22: engine.num_threads = '3': expected a whole number, found text",
        ),
        ("step_timeout_s: 1e3", "@9:25: engine.step_timeout_s = '1e3': expected a number, found"),
        ("prefix_cache: 1", "@9:23: engine.prefix_cache = 1: expected true or false"),
        ("kv_memory: 2gigs", "@9:20: engine.kv_memory = '2gigs': expected bytes as a whole number"),
        ("mem_fraction: .inf", "@9:23: engine.mem_fraction = inf: input should be a finite number"),
        ("mem_fraction: 2.0", "@9:23: engine.mem_fraction = 2.0: must be at most 0.95"),
        (
            "served_name: x",
            "@9:9: engine.served_name = 'x': unknown key; did you mean model.served",
        ),
        ("quantum: 1", "@9:9: engine.quantum = 1: unknown key; the keys of engine are device,"),
    ],
)
def test_a_fault_in_a_file_is_found_at_its_line_and_column(
    tmp_path: Path, line: str, expected: str
) -> None:
    text = HEAD + f"      model: {{path: x}}\n      engine:\n        {line}\n"

    message = load_error(tmp_path, text)

    assert message.startswith(expected)


def test_a_contradiction_in_a_file_is_placed_at_one_of_its_keys(tmp_path: Path) -> None:
    text = HEAD + MODEL + "      engine:\n        kv_tokens: 9\n        kv_memory: 1GiB\n"

    assert load_error(tmp_path, text).startswith("@10:20: engine.kv_tokens = 9: kv_memory is set")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, "model: required key is missing"),
        ({"model": {}}, "model.path: required key is missing"),
        ({"model": {"pth": "x"}}, "model.path: required key is missing (found pth)"),
        ({"model": {"path": " "}}, "model.path = ' ': must not be empty"),
        ({"model": 3}, "model = 3: expected a mapping of keys to values, found a whole number"),
        ({"model": {"path": "x"}, "engine": None}, "engine = null: expected a mapping"),
        ({"model": {"path": "x"}, "modle": {}}, "modle = {}: unknown key; did you mean model?"),
        ({"model": {"path": "x", 3: 4}}, "model: the key 3 is not text"),
        ({"model": {"path": "x"}, 7: {}}, "args: the key 7 is not text"),
        # written values that contradict each other
        (
            {"model": {"path": "a.gguf", "load_format": "safetensors"}},
            "model.load_format = 'safetensors': path is a .gguf file",
        ),
        (
            with_engine(kv_memory=10**9, kv_tokens=100),
            "engine.kv_tokens = 100: kv_memory is set too",
        ),
        (
            with_engine(kv_tokens=9, mem_fraction=0.5),
            "engine.mem_fraction = 0.5: kv_tokens is set too",
        ),
        (
            with_engine(max_step_tokens=100, prefill_chunk_tokens=200),
            "engine.prefill_chunk_tokens = 200: must not exceed max_step_tokens (100)",
        ),
        (
            with_engine(max_step_tokens=10, max_running_requests=20),
            "engine.max_running_requests = 20: must not exceed max_step_tokens (10)",
        ),
    ],
)
def test_faults_without_a_file_carry_the_same_words(args: dict[Any, Any], expected: str) -> None:
    assert args_error(args).startswith(expected)


def test_every_fault_is_reported_and_long_values_are_shortened() -> None:
    message = args_error(with_engine(page_size=3, kv_tokens=0, device="x" * 5000, foo=1))

    assert len(message.splitlines()) == 4
    assert "x" * 100 not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", " the file is empty"),
        ("3", "1:1: expected the keys of a Serve config file"),
        ("a: [1\n", "2:1: not valid YAML: "),
        ("a: 1\na: 2\n", "2:1: a: written twice; the first is in line 1"),
        ("a: &a [*a]\n", "1:4: an alias contains itself"),
        (
            "a: !!python/object:os.system x\n",
            "1:4: not valid YAML: could not determine a construct",
        ),
        ("a: 2026-99-99\n", " a value cannot be read: month must be in 1..12"),
        ("a: b: c\n", "1:5: not valid YAML: mapping values are not allowed here"),
        ("\tx: 1\n", "1:1: not valid YAML: found character '\\t'"),
        ("a: \x00\n", " not readable as YAML: unacceptable character #x0000"),
        ("[" * 3000, " nested too deeply"),
        ("a: 1\n---\nb: 2\n", "2:1: not valid YAML: but found another document"),
        ("http_options: {}\n", "1:1: applications: required key is missing"),
        ("aplications: []\n", "1:1: applications: required key is missing (found aplications)"),
        ("applications: {}\n", "1:15: applications = {}: "),
        ("applications: []\n", "1:1: applications: none has import_path"),
        ("applications: [{import_path: a:b}]", "1:1: applications: none has import_path"),
        (
            "applications: [{args: {}}]",
            "1:16: applications[0].import_path: required key is missing",
        ),
        (
            f"applications: [{{import_path: '{IMPORT_PATH}'}}, {{import_path: '{IMPORT_PATH}'}}]",
            "1:1: applications: 2 entries have import_path",
        ),
        (
            f"applications: [{{import_path: '{IMPORT_PATH}'}}]",
            "1:16: model: required key is missing",
        ),
        (
            "http_options: {port: 70000}\napplications: []",
            "1:22: http_options.port = 70000: must be",
        ),
    ],
)
def test_a_file_that_is_no_serve_config_is_refused_at_its_place(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert load_error(tmp_path, text).startswith(f"@{expected}")


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(b"a: \xff\xfe")

    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_serve_file(path)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file|cannot be read"):
        load_serve_file(tmp_path / name)


def test_yaml_anchors_and_merges_work(tmp_path: Path) -> None:
    text = HEAD + MODEL + "      engine: &e {page_size: 8}\n"
    merged = text.replace("http_options:", "x: &base {path: from/base}\nhttp_options:").replace(
        "path: some/folder", "<<: *base"
    )

    assert load(tmp_path, merged).config.model.path == "from/base"


keys = st.sampled_from([*ServeConfig.model_fields, *(key for _, key in KEYS)]) | st.text(max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def fault_of(read: Callable[[], object]) -> str | None:
    """Return the operator's fault, or None; any other exception passes through."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return None


@given(st.dictionaries(keys, plain, max_size=5))
def test_whatever_the_args_are_they_are_valid_or_a_fault_of_the_operator(
    args: dict[str, Any],
) -> None:
    assert fault_of(lambda: parse_args(args)) != ""


@given(st.text(alphabet="abm:-{}[]&*!?|>'\"#%@`,. \n\t01\\x00é", max_size=40))
def test_whatever_a_file_holds_it_is_read_or_refused(text: str) -> None:
    fault = fault_of(lambda: parse_yaml(text, "x.yaml"))

    assert fault is None or fault.startswith("x.yaml:")
