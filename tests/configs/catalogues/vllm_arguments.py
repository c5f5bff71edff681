"""The arguments of `vllm serve`, read from a release's sources without importing or running them.

Knows how vLLM declares arguments: calls of `add_argument` whose type, choices and default come from
the fields of configuration classes, and classes whose every field is an argument. Knows nothing of
remora's catalogue.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.configs.catalogues.sources import Fact, Sources, default_of, kind_of, of_field, type_of

ENGINE = "vllm.engine.arg_utils"
SERVER = "vllm.entrypoints.common.cli_args"
# Numbers that may be written as 8k or 8K.
_COUNTS = {
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "kv_cache_memory_bytes",
    "safetensors_prefetch_block_size",
    "max_num_queued_tokens",
}


def arguments(path: Path) -> list[Fact]:
    """Return the arguments of `vllm serve` in a wheel, or in a folder that contains `vllm/`."""
    sources = Sources(path)
    found = [*_frontend(sources)]
    for module, name in ((SERVER, "make_arg_parser"), (ENGINE, "add_cli_args")):
        tree = sources.module(module)
        if tree is None:
            raise FileNotFoundError(f"{path} has no module {module}")
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name == name:
                found += _declared(sources, module, function)
    unique = {fact.name: fact for fact in found}
    return list(unique.values())


def _frontend(sources: Sources) -> Iterator[Fact]:
    """Yield the arguments of the HTTP server: each field of its class and of those above it."""
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        definition = sources.find(SERVER, name)
        if definition is None or not isinstance(definition[1], ast.ClassDef):
            raise LookupError(f"{SERVER} has no class {name}")
        for node in definition[1].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind, choices = type_of(kind_of(sources, SERVER, node.annotation))
                default = default_of(sources, SERVER, node.value)
                if kind == "list[str]" and node.target.id.startswith("allowed_"):
                    kind = "json"  # json.loads instead of several values
                flag = f"--{node.target.id.replace('_', '-')}"
                yield Fact(flag, (), kind, default, choices)


def _declared(sources: Sources, module: str, function: ast.FunctionDef) -> Iterator[Fact]:
    """Yield what the calls of `add_argument` in a function declare."""
    classes: dict[str, tuple[str, str | None]] = {}  # variable -> class, field
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            origin = _origin(node.value, classes)
            if origin is not None:
                classes[node.targets[0].id] = origin
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            flags = [ast.literal_eval(flag) for flag in node.args if isinstance(flag, ast.Constant)]
            if flags and flags[0].startswith("-"):
                yield _fact(sources, module, flags, node, classes)


def _origin(
    value: ast.expr, classes: Mapping[str, tuple[str, str | None]]
) -> tuple[str, str | None] | None:
    """Return the class, and the field, of `get_kwargs(Class)`, `x["field"]` or a variable."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("get_kwargs"):
        return ast.unparse(value.args[0]), None
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        above = _origin(value.value, classes)
        return None if above is None else (above[0], str(value.slice.value))
    if isinstance(value, ast.Name):
        return classes.get(value.id)
    return None


def _fact(
    sources: Sources,
    module: str,
    flags: list[str],
    call: ast.Call,
    classes: Mapping[str, tuple[str, str | None]],
) -> Fact:
    name = max(flags, key=lambda flag: (flag.startswith("--"), -flags.index(flag)))
    aliases = tuple(flag for flag in flags if flag != name)
    written: dict[str, ast.expr] = {}
    kind = "str"
    default: Any = None
    choices: tuple[Any, ...] | None = None
    for keyword in call.keywords:
        parts = [(keyword.arg, keyword.value)]
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            parts = [
                (None if key is None else ast.literal_eval(key), value)
                for key, value in zip(keyword.value.keys, keyword.value.values, strict=True)
            ]
        for key, value in parts:
            if key is not None:
                written[key] = value
            elif (origin := _origin(value, classes)) is not None and origin[1] is not None:
                kind, default, choices = of_field(sources, module, origin[0], origin[1])
                kind = "count" if origin[1] in _COUNTS else kind
    if "action" in written:
        kind = "bool" if "Bool" in ast.unparse(written["action"]) else kind
        kind = "bool" if "store_true" in ast.unparse(written["action"]) else kind
        default = False if kind == "bool" and "default" not in written else default
    if "type" in written and ast.unparse(written["type"]) in ("int", "float"):
        kind = ast.unparse(written["type"])
    if "choices" in written:
        choices = _choices(sources, module, written["choices"])
        kind = "enum"
    if "default" in written:
        default = default_of(sources, module, written["default"])
    return Fact(name, aliases, kind, default, choices)


def _choices(sources: Sources, module: str, value: ast.expr) -> tuple[Any, ...]:
    if isinstance(value, ast.Call):  # get_args(Alias)
        return kind_of(sources, module, value.args[0]).literals
    while isinstance(value, ast.BinOp):  # a list, and what the platform adds
        value = value.left
    return tuple(ast.literal_eval(value))
