"""JSON schema in a plain form that compilers handle correctly.

Compilers of schemas silently ignore keywords that they do not know, and some combinations: `enum`
with `type`, `$ref` with `maxLength`, `oneOf` with overlapping branches. This module rewrites every
schema so that each place contains exactly one of

    {"$ref": "#/$defs/..."}   {"anyOf": [...]}   {"enum": [...]}   {"type": one type, its keywords}

and refuses everything else, by path and keyword. The schema allows every value that the plain form
allows. The plain form is narrower where that keeps models from rambling: an object with properties
and without `additionalProperties` has no others, and a pattern must match the whole string.

Knows no compiler. `types.py` has the four types with keywords of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.json_schema.merge import KEYWORDS_OF, Schema, keywords, merge, spelled
from remora.engine.grammar.json_schema.termination import check_ends
from remora.engine.grammar.json_schema.types import (
    plain_array,
    plain_number,
    plain_object,
    plain_string,
)

MAX_PLAIN_NODES = 10_000
MAX_DEPTH = 100
MAX_INLINED = 40
MAX_ENUM_INTEGER = 2**53
# Processor time. Schemas are parsed in the engine's process and hold the interpreter meanwhile.
MAX_READ_S = 0.5
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

ANY_NAME = "any"
ANY: Schema = {"$ref": f"#/$defs/{ANY_NAME}"}
ANY_PLAIN: Schema = {
    "anyOf": [
        {"type": "object", "additionalProperties": ANY},
        {"type": "array", "items": ANY},
        *({"type": name} for name in ("string", "number", "boolean", "null")),
    ]
}


def plain_schema(schema: Any) -> Schema:
    """Rewrite a schema (parsed JSON); `$defs` of the result contain what it refers to.

    Raises ConstraintError, which names the path and the keyword.
    """
    return _Reader(schema).read()


class _Reader:
    """One schema being rewritten."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # pointer -> name among the new definitions
        self._uses_any = False
        self._num_nodes = 0
        self._depth = 0
        self._until_s = time.thread_time() + MAX_READ_S

    def read(self) -> Schema:
        """Rewrite the root, then everything that it refers to."""
        root = self.schema(self._root, "#")
        defs: dict[str, Schema] = {}
        while len(defs) < len(self._names):
            pointer, name = list(self._names.items())[len(defs)]
            defs[name] = self.schema(self._target(pointer, pointer), pointer)
        if self._uses_any:
            defs[ANY_NAME] = ANY_PLAIN
        check_ends(root, defs)
        return {**root, "$defs": defs} if defs else root

    def schema(self, node: Any, path: str) -> Schema:
        """Rewrite one place."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ConstraintError(f"{path[:200]}: written out, the schema nests too deep")
        plain = self._plain(self._flat(node, path), path)
        self._depth -= 1
        return plain

    def any(self) -> Schema:
        """Return the plain form of any JSON value."""
        self._uses_any = True
        return ANY

    def _flat(self, node: Any, path: str, depth: int = 0) -> Schema:
        """Return the keywords of a place, merged with those of `allOf` and next to `$ref`."""
        if depth > MAX_INLINED:
            raise ConstraintError(f"{path}: the schemas put together here refer to themselves")
        self._check_time()
        flat = keywords(node, path)
        parts = flat.pop("allOf", [])
        if "$ref" in flat and (len(flat) > 1 or parts):
            parts = [{"$ref": flat.pop("$ref")}, *parts]
        for index, part in enumerate(parts):
            inner = self._flat(part, f"{path}/allOf/{index}", depth + 1)
            while "$ref" in inner and (flat or len(parts) > 1):
                inner = self._flat(self._target(inner["$ref"], path), path, depth + 1)
                depth += 1
                if depth > MAX_INLINED:
                    raise ConstraintError(f"{path}: '$ref' refers to itself")
            flat = merge(flat, inner, path)
        return flat

    def _plain(self, flat: Schema, path: str) -> Schema:
        self._num_nodes += 1
        if self._num_nodes > MAX_PLAIN_NODES:
            raise ConstraintError(f"{path}: written out, the schema has too many parts")
        if "$ref" in flat:
            return self._reference(flat["$ref"], path)
        if "const" in flat:
            rest = {key: value for key, value in flat.items() if key != "const"}
            return self._plain(merge(rest, {"enum": [flat["const"]]}, path), path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in flat:
                return self._branches(flat, keyword, path)
        types = _types(flat, path)
        if "enum" in flat:
            return _enum(flat, types, path)
        if not types:
            return self.any()
        options = [self._typed(name, flat, path) for name in types]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _typed(self, name: str, flat: Schema, path: str) -> Schema:
        if name == "string":
            return plain_string(flat, path)
        if name in ("number", "integer"):
            return plain_number(name, flat, path)
        if name == "array":
            return plain_array(self, flat, path)
        if name == "object":
            return plain_object(self, flat, path)
        return {"type": name}

    def _branches(self, flat: Schema, keyword: str, path: str) -> Schema:
        rest = {key: value for key, value in flat.items() if key != keyword}
        branches = []
        for index, node in enumerate(flat[keyword]):
            branch = self._flat(node, f"{path}/{keyword}/{index}")
            branches.append(merge(rest, self._solid(branch, path), path) if rest else branch)
        if not branches:
            raise ConstraintError(f"{path}: {keyword!r} is empty")
        if keyword == "oneOf":
            self._check_one_of(branches, path)
        options = [
            self._plain(branch, f"{path}/{keyword}/{index}")
            for index, branch in enumerate(branches)
        ]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _check_one_of(self, branches: Sequence[Schema], path: str) -> None:
        sets = [{*map(spelled, _values(branch) or ())} for branch in branches]
        if all(sets) and sum(map(len, sets)) == len(set().union(*sets)):
            return
        for index, branch in enumerate(branches):
            for other in branches[:index]:
                if not self._are_disjoint(branch, other, path, depth=0):
                    raise ConstraintError(
                        f"{path}: the keyword 'oneOf' can be enforced only where no value can"
                        " match two branches (other types, or a required property with other"
                        " constants); use 'anyOf'"
                    )

    def _are_disjoint(self, first: Schema, second: Schema, path: str, depth: int) -> bool:
        """Whether the schemas obviously exclude each other."""
        self._check_time()
        one, other = self._solid(first, path), self._solid(second, path)
        if depth > 4:
            return False
        for both, single in ((one, other), (other, one)):
            for keyword in both.keys() & {"anyOf", "oneOf"}:
                nodes = [self._flat(node, path) for node in both[keyword]]
                return all(self._are_disjoint(node, single, path, depth + 1) for node in nodes)
        values, others = _values(one), _values(other)
        if values is not None and others is not None:
            return {*map(spelled, values)}.isdisjoint(map(spelled, others))
        kinds, other_kinds = _kinds(one, path), _kinds(other, path)
        if not kinds & other_kinds:
            return True
        if kinds != {"object"} or other_kinds != {"object"}:
            return False
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        here, there = one.get("properties", {}), other.get("properties", {})
        return any(
            self._are_disjoint(
                self._flat(here[name], path), self._flat(there[name], path), path, depth + 1
            )
            for name in shared & here.keys() & there.keys()
        )

    def _solid(self, flat: Schema, path: str) -> Schema:
        """Follow a reference to its keywords."""
        for _ in range(MAX_INLINED):
            if "$ref" not in flat:
                return flat
            flat = self._flat(self._target(flat["$ref"], path), path)
        raise ConstraintError(f"{path}: '$ref' refers to itself")

    def _check_time(self) -> None:
        if time.thread_time() > self._until_s:
            raise ConstraintError("to read a schema of this size and shape takes too long")

    def _reference(self, pointer: str, path: str) -> Schema:
        self._target(pointer, path)
        name = self._names.setdefault(pointer, f"d{len(self._names)}")
        return {"$ref": f"#/$defs/{name}"}

    def _target(self, pointer: str, path: str) -> Any:
        """Return the target of a reference. Only places within the schema are looked up."""
        if pointer != "#" and not pointer.startswith("#/"):
            raise ConstraintError(
                f"{path}: '$ref' is {pointer[:100]!r}; only places within the schema (#/...)"
                " can be referred to"
            )
        node = self._root
        for step in pointer.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise ConstraintError(f"{path}: '$ref' {pointer[:100]!r} points at nothing")
        return node


def _types(flat: Schema, path: str) -> list[str]:
    """Return the types that a place allows; none: all. Keywords of one type select that type."""
    named = flat.get("type")
    if named is None:
        return [name for name, known in KEYWORDS_OF.items() if known & flat.keys()]
    types = named if isinstance(named, list) else [named]
    if not types or any(name not in TYPES for name in types):
        raise ConstraintError(f"{path}: 'type' must be one or more of {', '.join(TYPES)}")
    return [name for name in dict.fromkeys(types) if name != "integer" or "number" not in types]


def _enum(flat: Schema, types: Sequence[str], path: str) -> Schema:
    others = flat.keys() - {"enum", "type"}
    if others:
        raise ConstraintError(
            f"{path}: the keyword {min(others)!r} cannot be enforced together with enum"
        )
    named = flat.get("type")
    values = [
        value
        for value in flat["enum"]
        if named is None
        or _type_of(value) in types
        or ("number" in types and _type_of(value) == "integer")
    ]
    if not values:
        raise ConstraintError(f"{path}: 'enum' holds no value that is allowed here")
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_ENUM_INTEGER:
            raise ConstraintError(f"{path}: 'enum' holds an integer beyond 2**53")
    return {"enum": values}


def _values(flat: Schema) -> list[Any] | None:
    if "const" in flat:
        return [flat["const"]]
    values = flat.get("enum")
    return values if isinstance(values, list) else None


def _kinds(flat: Schema, path: str) -> set[str]:
    """Return the types of a place's values; integers count as numbers."""
    values = _values(flat)
    if values is not None:
        kinds = {_type_of(value) for value in values}
    else:
        kinds = set(_types(flat, path) or TYPES)
    return {"number" if kind == "integer" else kind for kind in kinds}


def _type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return names[type(value)]
