"""The package `remora`: what it exports, and that importing it is cheap."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import remora

ROOT = Path(__file__).resolve().parents[3]


def test_every_name_is_that_of_its_module() -> None:
    assert sorted(remora._MODULES) == sorted(remora.__all__)
    for name, module in remora._MODULES.items():
        assert getattr(remora, name) is getattr(import_module(module), name)
        assert name in dir(remora)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        remora._attribute("LLN")
    with pytest.raises(ImportError, match="LLN"):
        from remora import LLN  # type: ignore[attr-defined]  # noqa: F401


def test_importing_it_imports_nothing_else_of_ours_nor_a_library() -> None:
    code = "import sys; before = set(sys.modules); import remora; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    found = set(done.stdout.split())
    assert {name for name in found if name.startswith("remora")} == {"remora"}
    tops = {name.partition(".")[0] for name in found}
    assert tops - set(sys.stdlib_module_names) == {"remora"}


def test_the_version_is_that_of_the_distribution_and_of_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "remora.configs.version.__version__"
    assert project["project"]["dynamic"] == ["version"]
    assert f"## {remora.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
