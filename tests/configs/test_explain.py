from __future__ import annotations

from pathlib import Path

from remora.configs.explain import explain, reference_page
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
ARGS = {"model": {"path": "x"}, "engine": {"kv_memory": "1GiB"}}


def test_every_key_is_explained_with_value_origin_and_meaning() -> None:
    rows = explain(parse_args(ARGS), {"engine.kv_memory": "line 12"})

    settings = {row.name: (row.value, row.origin) for row in rows}
    assert settings["engine.kv_memory"] == (2**30, "line 12")
    assert settings["engine.page_size"] == (16, None)
    assert [row.name for row in rows if not row.description] == []


def test_the_json_schema_forbids_unknown_keys_everywhere() -> None:
    schema = ServeConfig.model_json_schema()

    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())


def test_the_documentation_page_is_the_one_generated() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    assert written == reference_page(), (
        "run: remora config schema --markdown > docs/configuration.md"
    )


def test_the_page_says_what_lists_and_mappings_hold() -> None:
    page = reference_page()

    expected = (
        "| `first_token_ids` * | list: whole number ≥ 0 or null | `null` |",
        "| `label_selector` | mapping | `{}` |",
        "| `adapters` | list of at most 1024: {`name`, `path`} | `[]` |",
        *(f"\n## {section}\n" for section in ServeConfig.model_fields),
    )
    assert [row for row in expected if row not in page] == []
