"""Reads PyTorch's own files, if the operator sets model.load_format: pt.

Such a file is a pickle, a program that builds objects. torch loads it with `weights_only`, which
allows tensors and containers only. Zip files are mapped and freed tensor by tensor; the format from
before 2020 is read a whole file at a time.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.files import find_files

ZIP_START = b"PK\x03\x04"
GLOBAL = re.compile(r"GLOBAL:? (\S+)")  # in torch's message about a name that it does not allow
WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which trainers store a model


class PickledWeights:
    """WeightSource over the PyTorch files of a folder; the largest tensors are read first.

    The extra copy of a tensor that is being read is then smaller than the tensors still to load.

    mmap:  map files if their format allows; otherwise one file at a time is in memory
    """

    def __init__(self, folder: Path, *, mmap: bool = True) -> None:
        self.label = folder.name
        self._mmap = mmap
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[Path, list[str]] = {}
        for file in find_files(folder, "pt"):
            tensors = _load(file, mmap=True)  # for the shapes only
            repeated = self._shapes.keys() & tensors.keys()
            if repeated:
                raise ConfigError(
                    f"{file} holds {min(repeated)} again, which another file of {folder} has. "
                    "Leave only the files of one model there."
                )
            self._shapes.update({name: tuple(value.shape) for name, value in tensors.items()})
            self._files[file] = sorted(tensors, key=self._size, reverse=True)
        by_size = sorted(
            self._files, key=lambda file: max(map(self._size, self._files[file]), default=0)
        )
        self._files = {file: self._files[file] for file in reversed(by_size)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names, file by file."""
        for file, inside in self._files.items():
            if not any(name in names for name in inside):
                continue
            is_mapped = self._mmap and _is_zip(file)
            tensors = _load(file, mmap=self._mmap)
            for name in inside:
                if name not in names:
                    continue
                tensor = tensors.pop(name)
                if is_mapped:  # after the last reference: another thread may still copy it
                    finalize(tensor, _free_pages, tensor.untyped_storage())
                yield name, tensor

    def _size(self, name: str) -> int:
        return math.prod(self._shapes[name])


def _load(file: Path, *, mmap: bool) -> dict[str, Tensor]:
    """Read a file's names and tensors. Raises ConfigError."""
    try:
        loaded = torch.load(
            file, map_location="cpu", weights_only=True, mmap=mmap and _is_zip(file)
        )
    except Exception as error:  # torch and its unpickler raise anything
        named = GLOBAL.search(str(error))
        if named is None:
            raise ConfigError(
                f"{file} cannot be read as a PyTorch file ({type(error).__name__}). "
                "Is the download complete?"
            ) from error
        raise ConfigError(
            f"{file} asks for {named[1]}: it holds objects other than tensors, and loading them "
            "would run code. Convert it to safetensors on a machine where you trust it."
        ) from error
    return _named_tensors(file, loaded)


def _named_tensors(file: Path, loaded: Any) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{file} holds a {type(loaded).__name__}; expected tensors by name (a state dict)."
        )
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(
                f"{file} holds a {type(value).__name__} as {name!r}; expected tensors by name "
                "(a state dict)."
            )
    return loaded


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(ZIP_START)) == ZIP_START


def _free_pages(storage: torch.UntypedStorage) -> None:
    """Free the pages of a mapped storage; another access reads them again."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), 4)
