"""Which test observes the effect of which configuration key: what `@pytest.mark.observes` says.

    @pytest.mark.observes("engine.page_size")

stands at a test that fails if the key has no effect. Written to `configs/observed.json`, from where
`remora config coverage` tells it, by `python -m tests.configs.observers`.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

TESTS = Path(__file__).parents[1]
OBSERVED = TESTS.parent / "configs" / "observed.json"


def observers() -> dict[str, str]:
    """Return the first test, by its id, that observes each key; ids go from the top folder."""
    found: dict[str, str] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "mark.observes" not in text:
            continue
        file = path.relative_to(TESTS.parent).as_posix()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for key in _keys(node):
                    found.setdefault(key, f"{file}::{node.name}")
    return dict(sorted(found.items()))


def _keys(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [
        ast.literal_eval(argument)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("mark.observes")
        for argument in decorator.args
    ]


def page() -> str:
    """Return the text of `configs/observed.json`."""
    return json.dumps(observers(), indent=1) + "\n"


if __name__ == "__main__":
    OBSERVED.write_text(page())
