"""Reading an adapter's folder: two files, plain ones, of a size that is looked at first.

Knows nothing of what stands in them. What is opened is what was looked at, so that a file cannot
be exchanged in between; a pipe or device is not waited for.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from remora.configs.errors import InvalidAdapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
MAX_CONFIG_BYTES = 2**20
MAX_WEIGHT_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterFiles:
    """What the files hold.

    config:   of adapter_config.json
    tensors:  of adapter_model.safetensors, under their names there
    digest:   which differs where either file does
    """

    config: Any
    tensors: dict[str, Tensor]
    digest: str


def read_files(folder: Path, *, max_bytes: int = MAX_WEIGHT_BYTES) -> AdapterFiles:
    """Read both files into memory. Raises InvalidAdapter, which names the file and the fault.

    max_bytes:  of the weights
    """
    config = _read(folder / CONFIG, MAX_CONFIG_BYTES)
    if not (folder / WEIGHTS).exists():
        _refuse_pickles(folder)
    weights = _read(folder / WEIGHTS, max_bytes)
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{folder / CONFIG} is not valid JSON: {error}") from error
    try:
        tensors = load(weights)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InvalidAdapter(
            f"{folder / WEIGHTS} cannot be read as safetensors: {error}. Is the copy complete?"
        ) from error
    digest = hashlib.sha256(b"%d\0" % len(config) + config)
    digest.update(weights)
    return AdapterFiles(config=parsed, tensors=tensors, digest=digest.hexdigest())


def _refuse_pickles(folder: Path) -> None:
    for name in PICKLES:
        if (folder / name).exists():
            raise InvalidAdapter(
                f"{folder} holds {name}, a pickle: loading it would run code from the file. Save "
                "the adapter again with save_pretrained(..., safe_serialization=True)"
            )


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise InvalidAdapter(f"{file} is not there; an adapter is a folder with it") from error
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{file} cannot be opened: {error}") from error
    try:
        facts = os.fstat(opened)
        if not stat.S_ISREG(facts.st_mode):
            raise InvalidAdapter(f"{file} is no regular file")
        if facts.st_size > max_bytes:
            raise InvalidAdapter(f"{file} has {facts.st_size} bytes; at most {max_bytes} are read")
        with open(opened, "rb", closefd=False) as stream:
            return stream.read(max_bytes)
    finally:
        os.close(opened)
