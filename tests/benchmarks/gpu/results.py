"""Files of a part's results, each written whole or not at all.

`gpu-a.json` holds all rows and is written again with each; `gpu-a.tar.gz` holds it together with
logs and tables, and is written again after each stage. A run that is killed leaves both.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

MAX_BYTES = 15 * 2**20  # of a tar before compression
MAX_FILE_BYTES = 2 * 2**20  # of a file in it; logs are cut at their beginning


def write(path: Path, data: bytes) -> None:
    """Write a file; who reads it meanwhile reads the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    os.replace(beside, path)


class Results:
    """The rows of a part by stage, and the folder whose files go into its tar.

    out:   of the JSON and the tar
    work:  of logs and tables
    """

    def __init__(self, part: str, out: Path, work: Path) -> None:
        self.out = out
        self.work = work
        self.about: dict[str, Any] = {}
        self.stages: dict[str, list[dict[str, Any]]] = {}
        self._json = out / f"gpu-{part}.json"
        self._tar = out / f"gpu-{part}.tar.gz"
        work.mkdir(parents=True, exist_ok=True)

    def add(self, stage: str, row: dict[str, Any]) -> None:
        """Add a row and write all of them."""
        self.stages.setdefault(stage, []).append(row)
        write(self._json, self._written())

    def pack(self) -> list[str]:
        """Write the tar; return the names of files that it has no room for."""
        left, left_out = MAX_BYTES, []
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, data in [(self._json.name, self._written()), *self._files()]:
                if len(data) > left:
                    left_out.append(name)
                    continue
                left -= len(data)
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        write(self._tar, packed.getvalue())
        return left_out

    def _written(self) -> bytes:
        return json.dumps({**self.about, "stages": self.stages}, indent=1).encode()

    def _files(self) -> list[tuple[str, bytes]]:
        """Return the ends of files, the smallest first."""
        found = []
        for path in sorted(self.work.rglob("*")):
            if path.is_file():
                data = path.read_bytes()[-MAX_FILE_BYTES:]
                found.append((str(path.relative_to(self.work)), data))
        return sorted(found, key=lambda each: len(each[1]))
