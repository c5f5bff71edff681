"""Opens a GGUF model: its metadata as plain values, and the positions of its tensors.

A model is one file, or several named after the first. The gguf library is imported when a file is
read, because most models are not GGUF.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.files import check_whole, gguf_parts
from remora.engine.weights.formats.mxfp4 import powers_of_two
from remora.engine.weights.gguf.header import Header, TensorInfo, read_header
from remora.engine.weights.gguf.quants import dequantise, is_readable
from remora.engine.weights.mmap import map_range
from remora.kernels.quantised.block_weight import BLOCK_TYPES, BlockWeight
from remora.kernels.quantised.weight_kinds import Float4Weight, WeightKind

MXFP4 = "MXFP4"


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """The position of a tensor in its file.

    shape:   in the usual order, which the file reverses
    kind:    a gguf.GGMLQuantizationType
    offset:  bytes from the file's start
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: Any
    offset: int
    num_bytes: int

    def read(self, dtype: torch.dtype = torch.float32, *, num_threads: int = 1) -> Tensor:
        """Map the tensor from its file and return its values, dequantised to `dtype`."""
        with self.file.open("rb") as opened:
            memory = map_range(opened, self.offset, self.num_bytes)
        return dequantise(memory, self.kind, self.shape, dtype, num_threads=num_threads)

    @property
    def is_kind(self) -> bool:
        """Whether `weight` can return the blocks."""
        return len(self.shape) == 2 and self.kind.name in (*BLOCK_TYPES, MXFP4)

    def weight(self) -> WeightKind:
        """Map the tensor from its file and return its blocks as stored. Raises ConfigError."""
        with self.file.open("rb") as opened:
            memory = map_range(opened, self.offset, self.num_bytes)
        blocks = torch.frombuffer(memory, dtype=torch.uint8).view(self.shape[0], -1)
        try:
            if self.kind.name == MXFP4:
                return _mxfp4(blocks)
            size = self.shape[0], self.shape[1]
            weight = BlockWeight(blocks=blocks, type=self.kind.name, size=size)
            weight.check_scales()
            return weight
        except ValueError as error:
            raise ConfigError(f"{self.name} in {self.file} cannot be decoded: {error}.") from error

    def rows(self, first: int, count: int) -> GGUFTensor:
        """Return the entries [first, last) of the first axis as a tensor."""
        num_bytes = self.num_bytes // self.shape[0]
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            offset=self.offset + first * num_bytes,
            num_bytes=count * num_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GGUFFile:
    """The content of a GGUF model."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    @property
    def architecture(self) -> str:
        """Return the name of the family, which is also the prefix of its keys."""
        return str(self.metadata.get("general.architecture"))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by its name in the file."""
        return {tensor.name: tensor.shape for tensor in self.tensors}

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting of the model, under the architecture's prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def token_setting(self, key: str, default: Any = None) -> Any:
        """Return a setting of the tokenizer."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


def _mxfp4(blocks: Tensor) -> Float4Weight:
    """Return the weight in blocks [O, bytes]: an exponent, then bytes of inputs j and j + 16."""
    parts = blocks.view(len(blocks), -1, 17)
    codes = torch.cat((parts[..., 1:] & 15, parts[..., 1:] >> 4), dim=2)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return Float4Weight(values=pairs.flatten(1), scales=powers_of_two(parts[..., 0].contiguous()))


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF model by its first file. Raises ConfigError if it is not one."""
    first, *others = (_read(file, file.stat().st_mtime_ns) for file in gguf_parts(path))
    if not others:
        return first
    tensors = tuple(tensor for part in (first, *others) for tensor in part.tensors)
    names = {tensor.name for tensor in tensors}
    said = first.metadata.get("split.tensors.count", len(tensors))
    if len(names) != said or len(tensors) != said:
        raise ConfigError(
            f"the {len(others) + 1} parts of {path} hold {len(names)} different tensors in "
            f"{len(tensors)} places; expected {said}. Are they of one model?"
        )
    return GGUFFile(path=path, metadata=first.metadata, tensors=tensors)


# Config, weights and tokenizer each open the file; parsing a vocabulary is slow.
@lru_cache(maxsize=16)
def _read(file: Path, modified_ns: int) -> GGUFFile:
    check_whole(file)
    header = read_header(file)
    tensors = tuple(_tensor(file, header, info) for info in header.tensors)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ConfigError(f"{file} holds two tensors of the same name.")
    return GGUFFile(path=file, metadata=header.metadata, tensors=tensors)


def _tensor(file: Path, header: Header, info: TensorInfo) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): kind for kind in GGMLQuantizationType}
    kind = known.get(info.kind)
    if kind is None or not is_readable(kind):
        raise ConfigError(
            f"{file} holds {info.name} as {kind.name if kind else f'type {info.kind}'}, which "
            "weights cannot be read from. Use a file of a common type, such as Q8_0 or Q4_K_M."
        )
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    shape = tuple(reversed(info.sizes))
    if not shape or shape[-1] % block_values:
        raise ConfigError(
            f"{file}: {info.name} is {list(shape)}, and rows of {kind.name} are of a multiple of "
            f"{block_values}. Is the download complete?"
        )
    offset = header.data_start + info.offset
    num_bytes = math.prod(shape) // block_values * block_bytes
    if offset + num_bytes > header.file_size:
        raise ConfigError(
            f"{file} cannot be read as GGUF: {info.name}, {kind.name} {list(shape)}, ends at byte "
            f"{offset + num_bytes:,}, and the file has {header.file_size:,}. "
            "Is the download complete?"
        )
    return GGUFTensor(
        file=file, name=info.name, shape=shape, kind=kind, offset=offset, num_bytes=num_bytes
    )
