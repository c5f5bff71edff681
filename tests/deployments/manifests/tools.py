"""The programs that check manifests; `make tools` fetches them.

A test that needs one is skipped where it is missing. As a script, names the missing ones.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
MANIFESTS = ROOT / "deployments" / "manifests"
CHART = MANIFESTS / "chart"
TOOLS = ROOT / "build" / "tools"
PACKAGES = TOOLS / "python"
SCHEMAS = (
    PACKAGES / "kubernetes_validate" / "kubernetes-json-schema" / "v1.34.0-local-strict"
)  # of Kubernetes 1.34; "strict": unknown fields are faults


@cache
def find(program: str) -> Path | None:
    """Return where a program of `make tools` is, or of the system; None = nowhere."""
    places = {
        "helm": PACKAGES / "helm_python",
        "schemas of Kubernetes": SCHEMAS,
        "promtool": TOOLS / "prometheus" / "usr" / "bin" / "promtool",
    }
    own = places.get(program)
    if own is not None and own.exists():
        return own
    found = shutil.which(program)
    return None if found is None or program == "helm" else Path(found)


@cache
def served_paths() -> frozenset[str]:
    """Return the paths that the server answers."""
    from tests.deployments.fakes import make_app, methods_of

    return frozenset(methods_of(make_app()))


def needs(program: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test without this program."""
    return pytest.mark.skipif(find(program) is None, reason=f"{program} is missing: make tools")


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


if __name__ == "__main__":
    for name in ("helm", "schemas of Kubernetes", "promtool", "systemd-analyze"):
        if find(name) is None:
            sys.stdout.write(f"Not available here: {name}. Its tests were skipped.\n")
