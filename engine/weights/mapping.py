"""Parts of files as memory.

A mapped page counts as this process's memory once it was read. Mapping one tensor at a time, and
letting go of it, keeps what is being loaded from counting twice.
"""

from __future__ import annotations

import mmap
import os
from typing import BinaryIO

from remora.configs.errors import ConfigError


def map_range(file: BinaryIO, offset: int, num_bytes: int) -> memoryview:
    """Map `num_bytes` from `offset` on, until the view and what was made of it are gone.

    Writing to the memory does not change the file. Raises ConfigError if the file is too short.
    """
    if num_bytes == 0:
        return memoryview(bytearray())
    if os.fstat(file.fileno()).st_size < offset + num_bytes:
        raise ConfigError(
            f"{file.name} ends before byte {offset + num_bytes:,}, where one of its tensors ends. "
            "Was it changed while it was read?"
        )
    slack = offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(
        file.fileno(), num_bytes + slack, offset=offset - slack, access=mmap.ACCESS_COPY
    )
    return memoryview(mapped)[slack:]
