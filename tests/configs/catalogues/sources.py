"""Python sources of a release, read without importing them: fields, types and defaults.

Knows wheels, folders, imports and annotations; knows no server.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

# What is computed where it is declared, so that no literal stands there.
COMPUTED = {
    "H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT": 4_194_304,
    "H11_MAX_HEADER_COUNT_DEFAULT": 256,
    "CERT_NONE": 0,
    "VLLM_SERVER_DEV_MODE": False,
}
_PLAIN = ("bool", "int", "float", "str")
_NAMED: Mapping[str, tuple[str, ...]] = {
    "Any": ("any",),
    "object": ("any",),
    "Path": ("str",),
    "PositiveInt": ("int",),
    "NonNegativeInt": ("int",),
    "PositiveFloat": ("float",),
    "NonNegativeFloat": ("float",),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """An argument: names, type, default and allowed values in the words of remora's catalogues."""

    name: str
    aliases: tuple[str, ...]
    type: str
    default: Any
    choices: tuple[Any, ...] | None


@dataclass
class Sources:
    """Modules of a wheel, or of an unpacked one."""

    path: Path
    modules: dict[str, ast.Module] = field(default_factory=dict)

    @cached_property
    def _zip(self) -> zipfile.ZipFile | None:
        return None if self.path.is_dir() else zipfile.ZipFile(self.path)

    def _text(self, file: str) -> str | None:
        if self._zip is None:
            found = self.path / file
            return found.read_text() if found.is_file() else None
        return self._zip.read(file).decode() if file in self._zip.namelist() else None

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, or None if the release has no such module."""
        if name not in self.modules:
            base = name.replace(".", "/")
            text = self._text(f"{base}.py") or self._text(f"{base}/__init__.py")
            if text is None:
                return None
            self.modules[name] = ast.parse(text)
        return self.modules[name]

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module from which a statement imports."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = self._text(f"{module.replace('.', '/')}/__init__.py") is not None
        above = parts[: len(parts) - node.level + is_package]
        return ".".join([*above, *([node.module] if node.module else [])])

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return the statement that defines a name, and its module, following imports."""
        tree = self.module(module)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        found = self.find(self._origin(module, node), alias.name)
                        if found is not None:
                            return found
            elif isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    return module, node
        return None


@dataclass(frozen=True, slots=True)
class Kind:
    """A type annotation, flattened: the kinds that its union has."""

    names: tuple[str, ...] = ()
    literals: tuple[Any, ...] = ()
    item: str | None = None


def of_field(
    sources: Sources, module: str, name: str, attribute: str
) -> tuple[str, Any, tuple[Any, ...] | None]:
    """Return type, default and choices of a field of a class or of those above it."""
    place, node = sources.find(module, name) or (module, None)
    if not isinstance(node, ast.ClassDef):
        raise LookupError(f"{module} has no class {name}")
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == attribute:
            kind, choices = type_of(kind_of(sources, place, each.annotation))
            return kind, default_of(sources, place, each.value), choices
    for base in node.bases:
        with_base = sources.find(place, ast.unparse(base).split("[")[0])
        if with_base is not None:
            return of_field(sources, with_base[0], ast.unparse(base), attribute)
    raise LookupError(f"{name} has no field {attribute}")


def type_of(kind: Kind) -> tuple[str, tuple[Any, ...] | None]:
    """Return the catalogue's type, and the values that are named."""
    names, choices = set(kind.names), kind.literals or None
    if "json" in names:
        return ("str" if "str" in names else "json"), None
    if "bool" in names:
        return ("str" if "str" in names else "bool"), None
    if kind.item is not None:
        return f"list[{kind.item}]", choices
    if choices is not None:
        return ("str" if "str" in names else "enum"), choices
    known = [name for name in ("float", "int", "str") if name in names]
    return (known[0] if known else "json" if "any" in names else "str"), None


def kind_of(sources: Sources, module: str, node: ast.expr) -> Kind:
    """Return what an annotation allows, with aliases, enumerations and classes resolved."""
    if isinstance(node, ast.BinOp):
        return _joined(kind_of(sources, module, node.left), kind_of(sources, module, node.right))
    if isinstance(node, ast.Subscript):
        outer, inner = ast.unparse(node.value).split(".")[-1], node.slice
        items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer == "Literal":
            parts = [_literal(sources, module, item) for item in items]
            return Kind(literals=tuple(value for part in parts for value in part))
        if outer in ("Optional", "Annotated", "SkipValidation", "InitVar", "ClassVar"):
            return kind_of(sources, module, items[0])
        if outer == "Union":
            return _joined(*(kind_of(sources, module, item) for item in items))
        if outer in ("list", "List", "tuple", "set", "Sequence"):
            below = kind_of(sources, module, items[0])
            plain = {*below.names} & {*_PLAIN}
            item = plain.pop() if len(plain) == 1 and not below.literals else "str"
            item = "any" if "json" in below.names else item  # objects, or texts that mean them
            return Kind(literals=below.literals, item=item)
        return Kind(names=("json",) if outer in ("dict", "Dict", "Mapping") else ())
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        return kind_of(sources, module, ast.parse(text, mode="eval").body) if text else Kind()
    name = ast.unparse(node)
    return Kind(names=(name,)) if name in _PLAIN else _named(sources, module, name)


def _named(sources: Sources, module: str, name: str) -> Kind:
    if name in _NAMED:
        return Kind(names=_NAMED[name])
    definition = sources.find(module, name)
    if definition is None:
        return Kind(names=("str",))
    place, node = definition
    if isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base) for base in node.bases}
        if any("Enum" in base for base in bases):
            members = [
                target.id
                for each in node.body
                if isinstance(each, ast.Assign)
                for target in each.targets
                if isinstance(target, ast.Name) and not target.id.startswith("_")
            ]
            return Kind(names=("str",), literals=tuple(members))
        return Kind(names=("json",))
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return kind_of(sources, place, value) if value is not None else Kind()


def _joined(*kinds: Kind) -> Kind:
    return Kind(
        names=tuple(name for kind in kinds for name in kind.names),
        literals=tuple(value for kind in kinds for value in kind.literals),
        item=next((kind.item for kind in kinds if kind.item is not None), None),
    )


def _literal(sources: Sources, module: str, node: ast.expr) -> tuple[Any, ...]:
    if isinstance(node, ast.Constant):
        return (node.value,)
    return kind_of(sources, module, node).literals


def default_of(sources: Sources, module: str, node: ast.expr | None) -> Any:
    """Return a default that is written as a literal, or refers to one; None = computed or none."""
    if node is None:
        return None
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return _computed(sources, module, node)
    return sorted(value) if isinstance(value, set) else value


def _computed(sources: Sources, module: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        named: dict[str | None, ast.expr] = {each.arg: each.value for each in node.keywords}
        if "default" in named:
            return default_of(sources, module, named["default"])
        factory = named.get("default_factory")
        if isinstance(factory, ast.Lambda):
            return default_of(sources, module, factory.body)
        empty: dict[str, Callable[[], Any]] = {"list": list, "dict": dict}
        made = empty.get(ast.unparse(factory)) if factory is not None else None
        if made is not None:
            return made()
        is_number = ast.unparse(node.func) in ("int", "Field", "float") and node.args
        return default_of(sources, module, node.args[0]) if is_number else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id in ("envs", "ssl", "argparse"):
            return COMPUTED.get(node.attr)
        definition = sources.find(module, node.value.id)
        if definition is not None and isinstance(definition[1], ast.ClassDef):
            if any("Enum" in ast.unparse(base) for base in definition[1].bases):
                return node.attr
            return of_field(sources, module, node.value.id, node.attr)[1]
    if isinstance(node, ast.Name):
        if node.id in COMPUTED:
            return COMPUTED[node.id]
        definition = sources.find(module, node.id)
        if definition is not None and isinstance(definition[1], ast.Assign | ast.AnnAssign):
            return default_of(sources, definition[0], definition[1].value)
    return None
