"""Programs of others that some tests need; `make tools` fetches them into `build`.

A test that needs one is skipped where it is missing. As a script, names the missing ones.
"""

from __future__ import annotations

import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "build" / "tools"
PACKAGES = TOOLS / "python"
SCHEMAS = (
    PACKAGES / "kubernetes_validate" / "kubernetes-json-schema" / "v1.34.0-local-strict"
)  # of Kubernetes 1.34; "strict": unknown fields are faults
_CHROMIUM = TOOLS / "chromium" / "usr"
PLACES = {
    "helm": PACKAGES / "helm_python",
    "schemas of Kubernetes": SCHEMAS,
    "promtool": TOOLS / "prometheus" / "usr" / "bin" / "promtool",
    "axe-core": TOOLS / "axe" / "axe.min.js",
    "chromium": _CHROMIUM / "lib" / "chromium" / "chromium",
    "chromedriver": _CHROMIUM / "bin" / "chromedriver",
}
OF_SYSTEM = frozenset({"promtool", "chromium", "chromedriver", "systemd-analyze"})


@cache
def find(program: str) -> Path | None:
    """Return where a program of `make tools` is, or of the system; None = nowhere."""
    own = PLACES.get(program)
    if own is not None and own.exists():
        return own
    found = shutil.which(program) if program in OF_SYSTEM else None
    return None if found is None else Path(found)


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test without these programs."""
    missing = [program for program in programs if find(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"make tools; missing: {', '.join(missing)}")


def library_path() -> str:
    """Return the folders of the libraries that the fetched Chromium loads."""
    folders = sorted((_CHROMIUM / "lib").glob("*-linux-gnu"))
    return ":".join(str(each) for folder in folders for each in (folder, folder / "pulseaudio"))


if __name__ == "__main__":
    for name in (*PLACES, "systemd-analyze"):
        if find(name) is None:
            sys.stdout.write(f"Not available here: {name}. Its tests were skipped.\n")
