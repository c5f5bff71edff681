"""Fingerprints of checkpoints, from samples: tells models of the same shapes apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remora.engine.weights.files import weight_files

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
LENGTH_BYTES = 8  # of a safetensors header


def fingerprint(path: Path, raw_config: dict[str, Any]) -> str:
    """Return a hash of the config, and of the weight files' names, sizes, headers and samples.

    path:  a model folder, with or without weights, or a GGUF file
    """
    digest = hashlib.sha256(json.dumps(raw_config, sort_keys=True, default=str).encode())
    for file in weight_files(path):
        size = file.stat().st_size
        name = "" if file == path else file.name
        digest.update(f"\0{name}\0{size}\0".encode())
        for part in _parts(file, size):
            digest.update(part)
    return digest.hexdigest()


def _parts(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            yield opened.read(min(size, int.from_bytes(opened.read(LENGTH_BYTES), "little")))
        last = max(0, size - SAMPLE_BYTES)
        for number in range(NUM_SAMPLES):
            opened.seek(last * number // (NUM_SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)
