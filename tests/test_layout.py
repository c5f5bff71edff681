"""Who may import whom, and what product code may not do; read from the syntax trees."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "kernels", "engine", "lora", "deployments")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Prefixes of what a folder may import of ours.
OURS = {
    "configs": ("remora.configs",),
    "kernels": ("remora.kernels",),
    "engine": ("remora.configs", "remora.kernels", "remora.engine"),
    "lora": (
        *("remora.configs", "remora.kernels", "remora.lora"),
        *("remora.engine.protocols", "remora.engine.sources"),
    ),
    "deployments": ("remora",),
}
# What a folder may not import of others'; configs and kernels have a short list of what they may.
WEB = {"fastapi", "starlette", "uvicorn", "httpx", "prometheus_client"}
FOREIGN = {
    "engine": {"ray", "typer", *WEB},
    "lora": {"ray", "typer", *WEB},
    "deployments": set(),
}
ALLOWED = {
    "configs": {"pydantic", "pydantic_core", "yaml"},
    "kernels": {"torch", "triton", "numpy"},
}
# Words and phrases that a library's documentation would not use: name the thing instead.
BANNED = re.compile(
    r"\b(?:beside|told|nobody|somebody|whoever|hearsay|amid|hush|places? of (?:its|their) own"
    r"|as it came|lets go of|is told so|what is there|those that|the one that)\b",
    re.IGNORECASE,
)
MAX_MODULES = 22  # of a folder
UNSAFE_MODULES = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
UNSAFE_CALLS = {"eval", "exec", "print", "compile", "__import__"}


@dataclass(frozen=True)
class Facts:
    """What is asked of a file; read once.

    imports:    (line, dotted module) of every import, those within functions included
    imported_names:  the same, with `from a import b` as a and as a.b
    calls:      (line, name) of every call of a plain name
    functions:  (name, lines) of every function
    """

    docstring: str | None
    num_lines: int
    imports: list[tuple[int, str]]
    imported_names: list[tuple[int, str]]
    calls: list[tuple[int, str]]
    functions: list[tuple[str, int]]


@cache
def facts_of(path: Path) -> Facts:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    facts = Facts(ast.get_docstring(tree), len(text.splitlines()), [], [], [], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
            facts.imports.extend((node.lineno, name) for name in found)
            facts.imported_names.extend((node.lineno, name) for name in found)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from remora import engine` names remora.engine, not remora.
            names = [f"{module}.{alias.name}" for alias in node.names]
            found = names if module == "remora" else [module]
            facts.imports.extend((node.lineno, name) for name in found)
            facts.imported_names.extend((node.lineno, name) for name in [module, *names])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            facts.calls.append((node.lineno, node.func.id))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            facts.functions.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
    return facts


def imports(path: Path) -> list[tuple[int, str]]:
    return facts_of(path).imports


def faults_in(path: Path) -> list[str]:
    folder = path.relative_to(ROOT).parts[0]
    faults = []
    for line, module in imports(path):
        top = module.split(".")[0]
        if top == "remora":
            wrong = not any(f"{module}.".startswith(f"{prefix}.") for prefix in OURS[folder])
        elif folder in ALLOWED:
            wrong = top not in ALLOWED[folder] | sys.stdlib_module_names
        else:
            wrong = top in FOREIGN[folder]
        if wrong:
            faults.append(f"{path.relative_to(ROOT)}:{line}: {folder} may not import {module}")
    return faults


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Each of these reads all files: a test for each file would cost more than what it checks.


def test_a_module_imports_only_what_its_folder_may() -> None:
    assert [fault for path in SOURCES for fault in faults_in(path)] == []


def test_private_names_of_ray_are_in_one_module() -> None:
    private = re.compile(
        r"\bray\.(?:\w+\.)*_[a-z]\w*|\bray\.experimental\b|\b_(?:internal_kv|get_global_client)\w*"
        r"|\b_(?:replica_impl|shutting_down|with_ingress_request_router)\b|\b_(?:blocking|reserve)="
    )
    found = [
        f"{name_of(path)}: {match[0]}"
        for path in SOURCES
        if path != ROOT / "deployments" / "ray_private.py"
        for match in private.finditer(path.read_text(encoding="utf-8"))
    ]

    assert found == []


def test_our_folders_are_imported_under_the_brand() -> None:
    bare = [
        f"{name_of(path)}:{line}: {module}"
        for path in SOURCES + TESTS
        for line, module in imports(path)
        if module.split(".")[0] in FOLDERS or module.startswith(".")
    ]

    assert bare == []


def module_of(path: Path) -> str:
    if path.parent == ROOT / "engine" / "root":
        return "remora"
    return "remora." + name_of(path).removesuffix(".py").replace("/", ".")


def import_graph(paths: list[Path]) -> dict[str, set[str]]:
    """Return which of the modules each module imports, imports within functions included."""
    modules = {module_of(path) for path in paths}
    graph: dict[str, set[str]] = {}
    for path in paths:
        own = module_of(path)
        names = {name for _, name in facts_of(path).imported_names}
        graph[own] = {name for name in names if name in modules and name != own}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of the first import circle, in order; empty if there is none."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if circle := visit(imported, [*way, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(graph) if (circle := visit(module, []))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle_in(import_graph(SOURCES)) == []


def test_the_check_finds_a_circle() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}

    assert circle_in(graph) == ["b", "c"]
    assert circle_in(graph | {"c": set()}) == []


def test_a_folder_holds_at_most_22_modules() -> None:
    counts = Counter(name_of(path.parent) for path in SOURCES + TESTS)

    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def http_faults(path: Path) -> list[str]:
    """Return which imports of a module below deployments/http reach into a neighbouring API."""
    package = "remora.deployments.http."
    folder = path.relative_to(ROOT / "deployments" / "http").parts[0]
    shared = {"core", "prompt_embeddings"}
    allowed = {"core": {"core"}, "prompt_embeddings": shared}.get(
        folder, shared | {"generation", *({"storage", folder} if folder != "generation" else ())}
    )
    return [
        f"{name_of(path)}:{line}: {folder} may not import {module}"
        for line, module in imports(path)
        if module.startswith(package) and module.removeprefix(package).split(".")[0] not in allowed
    ]


def test_an_api_imports_what_all_share_but_no_other_api() -> None:
    paths = sorted((ROOT / "deployments" / "http").glob("*/*.py"))

    assert [fault for path in paths for fault in http_faults(path)] == []


def test_every_module_that_texts_name_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    missing = [
        f"{name_of(path)}: {found}"
        for path in [*pages, *SOURCES, *TESTS]
        for found in re.findall(
            r"(?<![\w/.-])(?:configs|kernels|engine|lora|deployments|tests)/[\w/]+\.py\b",
            path.read_text(encoding="utf-8"),
        )
        if not (ROOT / found).exists()
    ]

    assert missing == []


def test_product_code_and_documentation_use_plain_words() -> None:
    texts = [
        path
        for folder in (*FOLDERS, "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".h", ".cpp", ".yaml"}
    ]
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    found = [
        f"{name_of(path)}:{number}: {match[0]}"
        for path in [*texts, *pages]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := BANNED.search(line))
    ]

    assert found == []


def test_product_code_neither_prints_nor_runs_text_nor_unpickles() -> None:
    calls = [
        f"{name_of(path)}:{line}: {name}"
        for path in SOURCES
        for line, name in facts_of(path).calls
        if name in UNSAFE_CALLS
    ]
    modules = [
        f"{name_of(path)}:{line}: {module}"
        for path in SOURCES
        for line, module in imports(path)
        if module.split(".")[0] in UNSAFE_MODULES
    ]

    assert calls + modules == []


def test_a_module_opens_with_what_it_is_for_and_stays_short() -> None:
    assert [name_of(path) for path in SOURCES if not facts_of(path).docstring] == []
    assert [name_of(path) for path in SOURCES if facts_of(path).num_lines >= 500] == []


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{name_of(path)}: {name} has {lines} lines"
        for path in SOURCES
        for name, lines in facts_of(path).functions
        if lines > 70
    ]

    assert long == []


def test_all_folders_but_the_root_package_are_namespaces() -> None:
    found = [name_of(path) for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]

    assert found == ["engine/root/__init__.py"]


def test_the_package_list_names_every_folder_that_holds_code() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    listed = tools["setuptools"]["package-dir"]

    holding = {name_of(path.parent) for path in SOURCES}

    assert set(listed.values()) == holding
    assert sorted(tools["setuptools"]["packages"]) == sorted(listed)
    assert listed.pop("remora") == "engine/root"
    assert all(
        package == f"remora.{folder.replace('/', '.')}" for package, folder in listed.items()
    )


def test_continuous_integration_runs_what_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = ROOT / ".ci" / "run"

    assert "```bash\nmake test\n```" in readme
    commands = ci.read_text(encoding="utf-8").splitlines()
    assert {"make test", "make check"} <= set(commands)
    assert any(command.startswith("make test-slow SLICE=") for command in commands)
    assert ci.stat().st_mode & 0o100


@pytest.mark.parametrize("target", ["serve", "test", "test-slow", "check", "bench", "setup"])
def test_the_makefile_has_the_commands(target: str) -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()

    assert any(line.startswith(f"{target}:") for line in lines)


def test_every_link_within_the_documentation_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]

    assert links == []


@pytest.mark.parametrize(
    ("folder", "text", "is_fault"),
    [
        ("configs", "import torch", True),
        ("configs", "from remora.engine import types", True),
        ("kernels", "from remora.configs.errors import ConfigError", True),
        ("engine", "import ray.serve", True),
        ("engine", "def f():\n    from fastapi import FastAPI", True),
        ("engine", "from remora import deployments", True),
        ("lora", "from remora.engine.types import Request", True),
        ("lora", "from remora.engine.protocols import Model", False),
        ("deployments", "from ray import serve", False),
    ],
)
def test_the_check_itself_tells_right_from_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, text: str, is_fault: bool
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / folder / "module.py"
    path.parent.mkdir()
    path.write_text(text)

    assert bool(faults_in(path)) is is_fault
