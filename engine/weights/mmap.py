"""Maps or reads byte ranges of files.

A mapped page counts as the process's memory after it was read. Mapping one tensor at a time, and
unmapping it, keeps the weights from counting twice while they load.
"""

from __future__ import annotations

import mmap
import os
from typing import BinaryIO

from remora.configs.errors import ConfigError


def map_range(file: BinaryIO, offset: int, num_bytes: int) -> memoryview:
    """Map `num_bytes` from `offset` on, as long as the view or a tensor over it exists.

    Writes do not change the file. Raises ConfigError if the file is too short.
    """
    if num_bytes == 0:
        return memoryview(bytearray())
    _check_length(file, offset + num_bytes)
    slack = offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(
        file.fileno(), num_bytes + slack, offset=offset - slack, access=mmap.ACCESS_COPY
    )
    return memoryview(mapped)[slack:]


def read_range(file: BinaryIO, offset: int, num_bytes: int) -> memoryview:
    """Read `num_bytes` from `offset` on. Raises ConfigError if the file is too short."""
    _check_length(file, offset + num_bytes)
    memory = memoryview(bytearray(num_bytes))
    file.seek(offset)
    done = 0
    while done < num_bytes:
        done += file.readinto(memory[done:])  # type: ignore[attr-defined]
    return memory


def _check_length(file: BinaryIO, end: int) -> None:
    if os.fstat(file.fileno()).st_size < end:
        raise ConfigError(
            f"{file.name} ends before byte {end:,}, where one of its tensors ends. "
            "Did it change during the read?"
        )
