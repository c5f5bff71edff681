"""The catalogues of vLLM and Ray Serve LLM are those of the releases that they name.

The package of a server is compared if it is at hand: installed, or a wheel or folder in the
variable REMORA_VLLM_RELEASE (REMORA_RAY_RELEASE). A newer release fails with what it adds.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from remora.configs.dialects.catalogue import System, catalogue, release
from tests.configs.catalogues.ray_llm_fields import fields
from tests.configs.catalogues.vllm_arguments import arguments
from tests.configs.catalogues.write import DATA, READERS, page, release_of, rows

SYSTEMS: tuple[System, ...] = ("vllm", "ray_serve_llm")


def at_hand(package: str) -> Path:
    """Return the wheel or folder of a package. Skips the test if there is none."""
    named = os.environ.get(f"REMORA_{package.upper()}_RELEASE")
    if named:
        return Path(named)
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not at hand: pip download {package} --no-deps")
    return Path(found.origin).parents[1]


def differences(system: System, path: Path) -> list[str]:
    """Return a line for each parameter that a release adds, changes or no longer has."""
    found = {row["name"]: row for row in rows(system, path)}
    known = {name: row for name, row in catalogue(system).items() if not row.additional}
    lines = [f"adds {name}" for name in found if name not in catalogue(system)]
    lines += [f"no longer has {name}" for name in known if name not in found]
    for name in known.keys() & found.keys():
        row, own = found[name], known[name]
        changed = [
            f"{key} is {row[key]!r}, was {ours!r}"
            for key, ours in (("type", own.type), ("default", own.default))
            if row[key] != ours
        ]
        lines += [f"changes {name}: {'; '.join(changed)}"] if changed else []
    return sorted(lines)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_catalogue_is_the_release_s(system: System) -> None:
    path = at_hand(READERS[system][0])
    found = differences(system, path)
    assert not found, (
        f"{release_of(system, path)} instead of {release(system)}:\n"
        + "\n".join(found)
        + f"\nrun: python -m tests.configs.catalogues.write {system} {path}"
    )
    assert (DATA / f"{system}.json").read_text() == page(rows(system, path))


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_parameter_has_a_subject_and_a_meaning(system: System) -> None:
    missing = [p.name for p in catalogue(system).values() if not (p.capability and p.summary)]
    assert missing == []
    assert all(len(parameter.summary) < 100 for parameter in catalogue(system).values())


VLLM = {
    "vllm/engine/arg_utils.py": """
from vllm.config import ModelConfig
def add_cli_args(parser):
    model_kwargs = get_kwargs(ModelConfig)
    group = parser.add_argument_group()
    group.add_argument("--dtype", **model_kwargs["dtype"])
    group.add_argument("--max-len", "-ml", **{**model_kwargs["max_model_len"], "default": None})
    group.add_argument("--names", **model_kwargs["names"])
    group.add_argument("--options", **model_kwargs["options"])
    group.add_argument("--backend", **model_kwargs["backend"])
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--level", choices=["a", "b"], default="a")
""",
    "vllm/config/__init__.py": "from .model import ModelConfig\n",
    "vllm/config/model.py": """
from enum import Enum
from typing import Literal
Kind = Literal["auto", "half"]
class Backend(Enum):
    FAST = 1
    SLOW = 2
class Base:
    names: list[str] = field(default_factory=list)
class ModelConfig(Base):
    dtype: Kind | str = "auto"
    max_model_len: int = Field(default=7, ge=1)
    options: dict[str, int] | None = None
    backend: Backend | None = Backend.SLOW
""",
    "vllm/entrypoints/common/cli_args.py": """
class BaseFrontendArgs:
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true", default=False)
""",
}


def test_arguments_are_read_without_importing(tmp_path: Path) -> None:
    for name, text in VLLM.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {f.name: (f.aliases, f.type, f.default, f.choices) for f in arguments(tmp_path)}
    assert found == {
        "--allowed-origins": ((), "json", ["*"], None),
        "--port": ((), "int", 8000, None),
        "--headless": ((), "bool", False, None),
        "--dtype": ((), "str", "auto", ("auto", "half")),
        "--max-len": (("-ml",), "count", None, None),
        "--names": ((), "list[str]", [], None),
        "--options": ((), "json", None, None),
        "--backend": ((), "str", "SLOW", ("FAST", "SLOW")),
        "--quiet": ((), "bool", False, None),
        "--level": ((), "enum", "a", ("a", "b")),
    }


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        arguments(tmp_path)
    with pytest.raises(LookupError):
        fields(tmp_path)
