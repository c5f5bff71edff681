"""What `remora config init` writes, and the schema that editors read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from remora.configs.explain import sections
from remora.configs.load import load_serve_file, parse_args
from remora.configs.profiles import PROFILES
from remora.configs.template import schema_page, template

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_template_is_a_valid_file_that_means_its_profile(tmp_path: Path, profile: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(template(profile, "m"))
    assert load_serve_file(path).config == parse_args({"profile": profile, "model": {"path": "m"}})


@pytest.mark.parametrize("profile", PROFILES)
def test_with_every_key_uncommented_it_still_means_the_same(tmp_path: Path, profile: str) -> None:
    """Defaults that contradict nothing: each section's own checks take them as unwritten."""
    text = uncommented(template(profile, "m"))
    (application,) = yaml.safe_load(text)["applications"]
    written = application["args"]
    config = parse_args({"profile": profile, "model": {"path": "m"}})
    for section, keys in written.items():
        for key, value in (keys or {}).items():
            assert _plain(getattr(getattr(config, section), key)) == value, (section, key)


def uncommented(text: str) -> str:
    fields = {section: set(kind.model_fields) for section, kind in sections()}
    lines, known = [], set(fields)
    for line in text.splitlines():
        section = re.fullmatch(r" {6}(?:# )?(\w+):", line)
        if section is not None:
            known = fields[section[1]]
            line = f"      {section[1]}:"
        key = re.match(r" {8}# (\w+):", line)
        lines.append(line.replace("# ", "", 1) if key is not None and key[1] in known else line)
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value


def test_lines_are_not_too_long() -> None:
    assert max(len(line) for line in template("cpu").splitlines()) <= 100


def test_shipped_files_name_the_schema_that_is_shipped() -> None:
    assert (CONFIGS / "remora.schema.json").read_text() == schema_page(), (
        "run: remora config schema --file > configs/remora.schema.json"
    )
    for path in CONFIGS.glob("*.yaml"):
        first = path.read_text().splitlines()[0]
        assert first == "# yaml-language-server: $schema=remora.schema.json", path
