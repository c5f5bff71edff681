"""What helm and promtool say of the manifests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tests.programs import PACKAGES, ROOT, find

MANIFESTS = ROOT / "deployments" / "manifests"
CHART = MANIFESTS / "chart"


@cache
def served_paths() -> frozenset[str]:
    """Return the paths that the server answers."""
    from tests.deployments.fakes import make_app, methods_of

    return frozenset(methods_of(make_app()))


# In a process of its own: helm is a library of Go, with threads and signal handlers.
_RENDER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import helm_python as helm
out = {"lint": helm.lint(sys.argv[2])["messages"], "renders": []}
with helm.Chart.load(sys.argv[2]) as chart:
    for values in json.loads(sys.argv[3]):
        try:
            chart.validate_schema(values)
            out["renders"].append(chart.render(values, name="demo", namespace="prod"))
        except helm.HelmError as error:
            out["renders"].append(str(error))
print(json.dumps(out))
"""


def render(values: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, str] | str], list[Any]]:
    """Return what helm makes of the chart with each of the values, and what its linter says.

    A result is {file: text}, or an error's message.
    """
    command = [sys.executable, "-c", _RENDER, str(PACKAGES), str(CHART), json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    return found["renders"], found["lint"]


def promtool(*arguments: str, stdin: str = "") -> str:
    """Run promtool, and return what it says; "" if it is content. It must be there."""
    program = find("promtool")
    assert program is not None
    done = subprocess.run(
        [str(program), *arguments], input=stdin, capture_output=True, text=True, timeout=60
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr
