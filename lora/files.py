"""Reads the two files of an adapter's folder: regular files, with their sizes checked first.

Does not interpret their content. Folder and files are opened once, as handles that read nothing
(O_PATH); the checks apply to the handles and the content is read from them, so neither can be
swapped in between, and pipes and devices do not block. Symbolic links are followed within the
folder only, and from a snapshot of the Hugging Face cache to the blobs of that cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError

from remora.configs.errors import AdapterNotFound, InvalidAdapter
from remora.configs.sections.lora import MAX_ADAPTER_BYTES
from remora.lora.checksums import MANIFESTS, MAX_MANIFEST_BYTES, check_sum, parse_manifest

if TYPE_CHECKING:  # checking files needs no torch
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
MAX_CONFIG_BYTES = 2**20
# Each tensor costs microseconds and about 1 KB, even if it is empty. 100,000 suffice for two
# factors of each matrix of 256 experts in 61 layers.
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 100_000
_LENGTH_BYTES = 8  # of the number in front of a safetensors header


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


def resolved(folder: str | Path) -> Path:
    """Return the absolute path of a folder without links, as `read_files` needs it."""
    return Path(os.path.realpath(folder))


def check_files(folder: Path, *, max_bytes: int, is_snapshot: bool = False) -> None:
    """Raise InvalidAdapter unless both are regular files of allowed sizes. Opens nothing.

    max_bytes:    limit for the weights
    is_snapshot:  the folder is in the Hugging Face cache: its files may link to the cache's blobs
    """
    if not os.path.isdir(folder):
        is_there = os.path.lexists(folder)
        kind, error = (
            ("is no folder", InvalidAdapter) if is_there else ("is not there", AdapterNotFound)
        )
        raise error(f"{folder} {kind}; an adapter is a folder with {CONFIG} and {WEIGHTS}")
    homes = _homes(resolved(folder))[: 2 if is_snapshot else 1]
    for name, most in size_limits(max_bytes):
        file = folder / name
        if not os.path.lexists(file):
            refuse_missing(folder, name, lambda other: (folder / other).exists())
        try:
            facts = os.stat(_located(file, homes))
        except OSError as error:
            raise InvalidAdapter(f"{file} cannot be opened: {error}") from error
        _check_facts(file, facts, most)


def read_files(folder: Path, *, max_bytes: int = MAX_ADAPTER_BYTES) -> AdapterFiles:
    """Read both files into memory. Raises InvalidAdapter.

    folder:     an absolute path without symbolic links: one is taken for a folder that was swapped
    max_bytes:  limit for the weights
    """
    with _opened(folder) as opened:
        config = _read(opened, folder / CONFIG, MAX_CONFIG_BYTES)
        weights = _read(opened, folder / WEIGHTS, max_bytes)
        _check_sums(opened, folder, config, weights)
    _check_header(folder / WEIGHTS, weights)
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


def size_limits(max_bytes: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the names of an adapter's files with their largest sizes in bytes."""
    return (CONFIG, MAX_CONFIG_BYTES), (WEIGHTS, max_bytes)


def check_size(home: object, name: str, num_bytes: float, most: int) -> None:
    """Raise InvalidAdapter if a file of the folder or URL `home` is larger than `most` bytes."""
    if num_bytes > most:
        key = " (lora.max_adapter_bytes)" if name == WEIGHTS else ""
        raise InvalidAdapter(f"{home}/{name} has {num_bytes} bytes; at most {most} are read{key}")


def refuse_missing(home: object, name: str, exists: Callable[[str], bool]) -> NoReturn:
    """Raise AdapterNotFound; pickles, which are never read, are named by InvalidAdapter.

    exists:  whether `home` has a file of this name
    """
    for pickle in PICKLES if name == WEIGHTS else ():
        if exists(pickle):
            raise InvalidAdapter(
                f"{home} holds {pickle}, a pickle: loading it would run code from the file. Save "
                "the adapter again with save_pretrained(..., safe_serialization=True)"
            )
    raise AdapterNotFound(f"{home}/{name} is not there; an adapter is a folder with it")


def _check_sums(opened: int, folder: Path, config: bytes, weights: bytes) -> None:
    for manifest in MANIFESTS:
        if os.path.lexists(_path_of(opened) / manifest):
            sums = parse_manifest(manifest, _read(opened, folder / manifest, MAX_MANIFEST_BYTES))
            for name, content in ((CONFIG, config), (WEIGHTS, weights)):
                if name in sums:
                    check_sum(name, hashlib.sha256(content).hexdigest(), manifest, sums)


def _check_header(file: Path, weights: bytes) -> None:
    """Raise InvalidAdapter for a safetensors header that is too long to parse."""
    length = int.from_bytes(weights[:_LENGTH_BYTES], "little")
    # Each tensor is a JSON object; a brace in a name counts as one, too.
    num_tensors = weights.count(b"{", _LENGTH_BYTES + 1, _LENGTH_BYTES + length)
    for found, most, what in (
        (length, MAX_HEADER_BYTES, "bytes of header"),
        (num_tensors, MAX_TENSORS, "tensors"),
    ):
        if found > most:
            raise InvalidAdapter(f"{file} has {found} {what}; at most {most} are read")


def _homes(real: Path) -> tuple[Path, ...]:
    """Return where the files of a folder (a path without links) may be, with links resolved."""
    return (real, real.parent.parent / "blobs") if real.parent.name == "snapshots" else (real,)


def _located(file: Path, homes: Collection[Path]) -> str:
    """Return a file's path with links resolved. Raises InvalidAdapter if it is not in `homes`."""
    real = os.path.realpath(file)
    if not any(Path(real).is_relative_to(home) for home in homes):
        has_more = len(_homes(resolved(file.parent))) > len(homes)
        advice = "; name it as hf://OWNER/NAME" if has_more else ""
        raise InvalidAdapter(f"{file} is a link that leads out of the adapter's folder{advice}")
    return real


def _check_facts(file: Path, facts: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidAdapter(f"{file} is no regular file")
    check_size(file.parent, file.name, facts.st_size, max_bytes)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder whose path has no links; the handle stays with it, whatever is moved."""
    try:
        opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise AdapterNotFound(f"{folder} is not there") from None
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{folder} cannot be opened: {error}") from error
    try:
        if _real_path(opened) != folder:
            raise InvalidAdapter(f"{folder} was replaced or moved while it was loaded; try again")
        yield opened
    finally:
        os.close(opened)


def _path_of(handle: int) -> Path:
    return Path(f"/proc/self/fd/{handle}")


def _real_path(handle: int) -> Path:
    return Path(os.readlink(_path_of(handle)))


def _open_file(opened: int, file: Path) -> int:
    """Return a handle of a file in the opened folder; a link is followed within its homes."""
    handle = os.open(file.name, os.O_PATH | os.O_CLOEXEC, dir_fd=opened)
    real = _real_path(handle)
    if any(real.is_relative_to(home) for home in _homes(_real_path(opened))):
        return handle
    os.close(handle)
    raise InvalidAdapter(f"{file} is a link that leads out of the adapter's folder")


def _read(opened: int, file: Path, max_bytes: int) -> bytes:
    try:
        handle = _open_file(opened, file)
    except FileNotFoundError:
        folder = _path_of(opened)
        refuse_missing(file.parent, file.name, lambda other: (folder / other).exists())
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{file} cannot be opened: {error}") from error
    try:
        _check_facts(file, os.fstat(handle), max_bytes)
        with _path_of(handle).open("rb") as stream:
            return stream.read(max_bytes)
    except OSError as error:
        raise InvalidAdapter(f"{file} cannot be read: {error}") from error
    finally:
        os.close(handle)
