from __future__ import annotations

from pathlib import Path

import pytest

from remora.configs.explain import explain, json_schema, reference_page
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
ARGS = {"model": {"path": "x"}, "engine": {"kv_memory": "1GiB"}}


def test_every_key_is_explained_with_value_and_origin() -> None:
    config = parse_args(ARGS)

    settings = {row.name: row for row in explain(config, {"engine.kv_memory": "line 12"})}

    assert settings["engine.kv_memory"].value == 2**30
    assert settings["engine.kv_memory"].origin == "line 12"
    assert settings["engine.page_size"].value == 16
    assert settings["engine.page_size"].origin is None


def test_every_key_has_a_description() -> None:
    undescribed = [row.name for row in explain(parse_args(ARGS), {}) if not row.description]

    assert undescribed == []


def test_the_json_schema_forbids_unknown_keys_everywhere() -> None:
    schema = json_schema()

    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())


def test_the_documentation_page_is_the_one_generated() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    assert written == reference_page(), (
        "run: remora config schema --markdown > docs/configuration.md"
    )


@pytest.mark.parametrize(
    "row",
    [
        "| `first_token_ids` * | list: whole number ≥ 0 or null | `null` |",
        "| `label_selector` | mapping | `{}` |",
        "| `adapters` | list of at most 1024: {`name`, `path`} | `[]` |",
    ],
)
def test_the_page_says_what_lists_and_mappings_hold(row: str) -> None:
    assert row in reference_page()


@pytest.mark.parametrize("section", ServeConfig.model_fields)
def test_the_page_has_every_section(section: str) -> None:
    assert f"\n## {section}\n" in reference_page()
