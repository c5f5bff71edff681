"""Write the catalogue of vLLM or Ray Serve LLM anew, from a release.

    python -m tests.configs.catalogues.write vllm vllm-0.33.0-py3-none-any.whl
    python -m tests.configs.catalogues.write ray_serve_llm .venv/lib/python3.11/site-packages

The release may be a wheel (`pip download vllm==0.33.0 --no-deps`) or a folder into which it is
installed. Names, types, defaults and allowed values come from the release; subjects and meanings
are remora's own and stay. A new parameter is written without them, and a test names it. Former
parameters, which older commands have, are `additional` rows, and stay too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remora.configs.dialects import catalogue as catalogues
from tests.configs.catalogues.ray_llm_fields import fields
from tests.configs.catalogues.sources import Fact
from tests.configs.catalogues.vllm_arguments import arguments

DATA = Path(catalogues.__file__).with_name("data")
RELEASES = DATA / "releases.json"
READERS: Mapping[str, tuple[str, Callable[[Path], list[Fact]]]] = {
    "vllm": ("vllm", arguments),
    "ray_serve_llm": ("ray", fields),
}
OURS = ("path", "any", "json")  # types that only remora tells apart


def release_of(system: str, path: Path) -> str:
    """Return the version of a wheel, or of the distribution that is installed into a folder."""
    package = READERS[system][0]
    if path.is_dir():
        (found,) = path.glob(f"{package}-*.dist-info")
        return found.name.removesuffix(".dist-info").partition("-")[2]
    match = re.match(rf"{package}-([^-]+)-", path.name)
    if match is None:
        raise SystemExit(f"{path}: expected a wheel of {package}, such as {package}-1.2.3-....whl")
    return match[1]


def rows(system: str, path: Path) -> list[dict[str, Any]]:
    """Return the catalogue of a release, with the subjects and meanings that remora has."""
    file = DATA / f"{system}.json"
    known = {row["name"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    found = []
    for fact in READERS[system][1](path):
        own = known.get(fact.name, {})
        kind = own["type"] if own.get("type") in OURS and fact.type == "str" else fact.type
        found.append(
            {
                "name": fact.name,
                "aliases": list(fact.aliases),
                "type": kind,
                "default": fact.default,
                "choices": None if fact.choices is None else list(fact.choices),
                "capability": own.get("capability", ""),
                "inverse": own.get("inverse", False),
                "summary": own.get("summary", ""),
            }
        )
    return [*found, *(row for row in known.values() if row.get("additional"))]


def page(written: list[dict[str, Any]]) -> str:
    """Return rows as text, a line for each."""
    return "[\n" + ",\n".join(json.dumps(row) for row in written) + "\n]\n"


def main(system: str, path: Path) -> None:
    """Write the catalogue, and the release that it describes."""
    written = rows(system, path)
    (DATA / f"{system}.json").write_text(page(written))
    releases = json.loads(RELEASES.read_text()) if RELEASES.exists() else {}
    releases[system] = release_of(system, path)
    RELEASES.write_text(json.dumps(dict(sorted(releases.items())), indent=1) + "\n")
    for row in written:
        if not row["summary"]:
            print(f"{row['name']}: new; write capability and summary")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
