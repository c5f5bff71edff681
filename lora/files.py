"""Reading an adapter's folder: two files, plain ones, of a size that is looked at first.

Knows nothing of what stands in them. What is opened is what was looked at, so that a file cannot
be exchanged in between; a pipe or device is not waited for. Links are followed within the folder
only, and from a snapshot of Hugging Face's cache to the blobs of the same cache.
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

if TYPE_CHECKING:  # who only looks at files can do without torch
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
MAX_CONFIG_BYTES = 2**20


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


def check_files(folder: Path, *, max_bytes: int, is_snapshot: bool = False) -> None:
    """Raise InvalidAdapter unless both files are there, plain and not too large. Opens nothing.

    max_bytes:    of the weights
    is_snapshot:  the folder is one of Hugging Face's cache: its files may be links into the blobs
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
    """Read both files into memory. Raises InvalidAdapter, which names the file and the fault.

    max_bytes:  of the weights
    """
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
    """Raise InvalidAdapter, which says why the pickle `name` in a folder is not read."""
    raise InvalidAdapter(
        f"{shown} holds {name}, a pickle: loading it would run code from the file. Save "
        "the adapter again with save_pretrained(..., safe_serialization=True)"
    )


def _check_sums(folder: Path, config: bytes, weights: bytes) -> None:
    for manifest in MANIFESTS:
        if os.path.lexists(folder / manifest):
            told = parse_manifest(manifest, _read(folder / manifest, MAX_MANIFEST_BYTES))
            for name, content in ((CONFIG, config), (WEIGHTS, weights)):
                if name in told:
                    check_sum(name, hashlib.sha256(content).hexdigest(), manifest, told)


def _refuse_missing(file: Path) -> NoReturn:
    if file.name == WEIGHTS:
        for name in PICKLES:
            if (file.parent / name).exists():
                refuse_pickle(file.parent, name)
    raise InvalidAdapter(f"{file} is not there; an adapter is a folder with it")


def _homes(folder: Path) -> tuple[Path, ...]:
    """Return the folders that the files of an adapter may really lie in, its own first."""
    real = Path(os.path.realpath(folder))
    return (real, real.parent.parent / "blobs") if real.parent.name == "snapshots" else (real,)


def _located(file: Path, homes: Collection[Path]) -> str:
    """Return where a file really is, links followed. Raises InvalidAdapter if not in `homes`."""
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
