"""Reads the two files of an adapter's folder: regular files, with their sizes checked first.

Does not interpret their content. The checks apply to the opened file, so it cannot be swapped in
between, and pipes and devices do not block. Symbolic links are followed within the folder only,
and from a snapshot of the Hugging Face cache to the blobs of that cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError

from remora.configs.errors import InvalidAdapter
from remora.configs.sections.lora import MAX_ADAPTER_BYTES
from remora.lora.checksums import MANIFESTS, MAX_MANIFEST_BYTES, check_sum, parse_manifest

if TYPE_CHECKING:  # checking files needs no torch
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterFiles:
    """The content of both files.

    config:   adapter_config.json
    tensors:  of adapter_model.safetensors, by name
    digest:   SHA-256 over both files
    """

    config: Any
    tensors: dict[str, Tensor]
    digest: str


def check_files(folder: Path, *, max_bytes: int, is_snapshot: bool = False) -> None:
    """Raise InvalidAdapter unless both are regular files of allowed sizes. Opens nothing.

    max_bytes:    limit for the weights
    is_snapshot:  the folder is in the Hugging Face cache: its files may link to the cache's blobs
    """
    if not os.path.isdir(folder):
        kind = "is no folder" if os.path.lexists(folder) else "is not there"
        raise InvalidAdapter(f"{folder} {kind}; an adapter is a folder with {CONFIG} and {WEIGHTS}")
    homes = _homes(folder) if is_snapshot else _homes(folder)[:1]
    for file, most in ((folder / CONFIG, MAX_CONFIG_BYTES), (folder / WEIGHTS, max_bytes)):
        if not os.path.lexists(file):
            _refuse_missing(file)
        try:
            facts = os.stat(_located(file, homes))
        except OSError as error:
            raise InvalidAdapter(f"{file} cannot be opened: {error}") from error
        _check_facts(file, facts, most)


def read_files(folder: Path, *, max_bytes: int = MAX_ADAPTER_BYTES) -> AdapterFiles:
    """Read both files into memory; the weights have at most `max_bytes`. Raises InvalidAdapter."""
    config = _read(folder / CONFIG, MAX_CONFIG_BYTES)
    weights = _read(folder / WEIGHTS, max_bytes)
    _check_sums(folder, config, weights)
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{folder / CONFIG} is not valid JSON: {error}") from error
    from safetensors.torch import load

    try:
        tensors = load(weights)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InvalidAdapter(
            f"{folder / WEIGHTS} cannot be read as safetensors: {error}. Is the copy complete?"
        ) from error
    digest = hashlib.sha256(b"%d\0" % len(config) + config)
    digest.update(weights)
    return AdapterFiles(config=parsed, tensors=tensors, digest=digest.hexdigest())


def refuse_pickle(shown: object, name: str) -> NoReturn:
    """Raise InvalidAdapter for a pickle `name`, which is never read."""
    raise InvalidAdapter(
        f"{shown} holds {name}, a pickle: loading it would run code from the file. Save "
        "the adapter again with save_pretrained(..., safe_serialization=True)"
    )


def _check_sums(folder: Path, config: bytes, weights: bytes) -> None:
    for manifest in MANIFESTS:
        if os.path.lexists(folder / manifest):
            sums = parse_manifest(manifest, _read(folder / manifest, MAX_MANIFEST_BYTES))
            for name, content in ((CONFIG, config), (WEIGHTS, weights)):
                if name in sums:
                    check_sum(name, hashlib.sha256(content).hexdigest(), manifest, sums)


def _refuse_missing(file: Path) -> NoReturn:
    if file.name == WEIGHTS:
        for name in PICKLES:
            if (file.parent / name).exists():
                refuse_pickle(file.parent, name)
    raise InvalidAdapter(f"{file} is not there; an adapter is a folder with it")


def _homes(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which an adapter's files may be after links are resolved."""
    real = Path(os.path.realpath(folder))
    return (real, real.parent.parent / "blobs") if real.parent.name == "snapshots" else (real,)


def _located(file: Path, homes: Collection[Path]) -> str:
    """Return a file's path with links resolved. Raises InvalidAdapter if it is not in `homes`."""
    real = os.path.realpath(file)
    if not any(Path(real).is_relative_to(home) for home in homes):
        advice = "; name it as hf://OWNER/NAME" if len(_homes(file.parent)) > len(homes) else ""
        raise InvalidAdapter(f"{file} is a link that leads out of the adapter's folder{advice}")
    return real


def _check_facts(file: Path, facts: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidAdapter(f"{file} is no regular file")
    if facts.st_size > max_bytes:
        raise InvalidAdapter(f"{file} has {facts.st_size} bytes; at most {max_bytes} are read")


def _read(file: Path, max_bytes: int) -> bytes:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        opened = os.open(_located(file, _homes(file.parent)), flags)
    except FileNotFoundError:
        _refuse_missing(file)
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{file} cannot be opened: {error}") from error
    try:
        _check_facts(file, os.fstat(opened), max_bytes)
        with open(opened, "rb", closefd=False) as stream:
            return stream.read(max_bytes)
    finally:
        os.close(opened)
