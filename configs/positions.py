"""Parse YAML into plain data, with the position of each key and value.

Knows nothing of what the keys mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from remora.configs.errors import ConfigError
from remora.configs.validation_messages import KeyPath

Mark = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file.

    source:     name of the file, for messages
    keys:       path of each key -> line and column of the key, counted from 1
    values:     path of each value -> line and column where the value begins
    elsewhere:  path of each value that is not in the file -> its origin
    """

    source: str
    data: Any
    keys: dict[KeyPath, Mark]
    values: dict[KeyPath, Mark]
    elsewhere: dict[KeyPath, str] = field(default_factory=dict)

    def locate(self, path: KeyPath, at_key: bool) -> str:
        """Return "file:line:column: " of a path, or of its nearest parent in the file."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.elsewhere:
                return f"{self.elsewhere[path[:end]]}: "
            marks = self.keys if at_key else self.values
            mark = marks.get(path[:end]) or self.values.get(path[:end])
            if mark is not None:
                return f"{self.source}:{mark[0]}:{mark[1]}: "
        return f"{self.source}: "


def read_text(path: str | Path, option: str = "") -> str:
    """Return the text of a file. Raises ConfigError; `option` begins its message."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{option}{path}: no such file; give the path of one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{option}{path}: cannot be read: {error.strerror}") from None


def parse_yaml(text: str, source: str) -> Document:
    """Parse `text`. Raises ConfigError, with the position, unless it is one valid document."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{source}: the file is empty; expected keys and values")
        _refuse_duplicates(node, source, ())
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_message(error, source)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not readable as YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{source}: a value cannot be read: {error}") from None
    keys: dict[KeyPath, Mark] = {}
    values: dict[KeyPath, Mark] = {}
    for path, key, value in _walk(node, (), None):
        keys[path] = _mark(key if key is not None else value)
        values[path] = _mark(value)
    return Document(source=source, data=data, keys=keys, values=values)


def _mark(node: yaml.Node) -> Mark:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _walk(
    node: yaml.Node, path: KeyPath, key: yaml.Node | None
) -> Iterator[tuple[KeyPath, yaml.Node | None, yaml.Node]]:
    yield path, key, node
    if isinstance(node, yaml.MappingNode):
        for child_key, child in node.value:
            yield from _walk(child, (*path, child_key.value), child_key)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _walk(child, (*path, index), None)


def _refuse_duplicates(node: yaml.Node, source: str, parents: tuple[int, ...]) -> None:
    """Refuse what YAML silently accepts: a duplicate key, and a value that contains itself."""
    if id(node) in parents:
        raise ConfigError("{}:{}:{}: an alias contains itself".format(source, *_mark(node)))
    parents = (*parents, id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_duplicates(child, source, parents)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, Mark] = {}
    for key, child in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                line, column = _mark(key)
                raise ConfigError(
                    f"{source}:{line}:{column}: {key.value}: written twice; "
                    f"the first is in line {seen[key.value][0]}"
                )
            seen[key.value] = _mark(key)
        _refuse_duplicates(child, source, parents)


def _syntax_message(error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark is not None else source
    context = f" ({error.context})" if error.context else ""
    return f"{place}: not valid YAML: {error.problem}{context}"
