"""The native library, loaded: its functions with their types, and the thread team.

Knows pointers and structures. Knows nothing of models, nor of how the library was compiled.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_void_p
from enum import IntEnum
from typing import Any

from remora.kernels.cpu.build import NativeUnavailable
from remora.kernels.cpu.structs import (
    MIRRORED,
    AttentionStruct,
    BatchStruct,
    CacheStruct,
    ChoicesStruct,
    HeadsStruct,
    JoinedStruct,
    LatentsStruct,
    LowRankStruct,
    NormStruct,
    OutputStruct,
    RotationStruct,
    RoutingStruct,
    RowsStruct,
    WeightedStruct,
    WeightStruct,
)


class Format(IntEnum):
    """Number formats of packed weights; see src/linear.h."""

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4 = 3

    @property
    def is_grouped(self) -> bool:
        """Whether weights and activations are quantised in groups."""
        return self in (Format.Q8, Format.Q4)


class Epilogue(IntEnum):
    """What a product does with its result; see src/linear.h."""

    STORE = 0
    ADD = 1
    GATED = 2


class Activation(IntEnum):
    """What is done with a product before it is stored, or gates; see src/activation.h."""

    LINEAR = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    RELU2 = 5
    CAP = 6
    SIGMOID = 7
    GATES = 8


PANEL = 64  # output columns of a packed weight's panel
LANES = 16  # what rows of head_dim and blocks of gated columns are padded to

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "instruction_set": (c_char_p, ()),
    "struct_size": (c_int, (c_int,)),
    "padded_k": (c_int, (c_int, c_int)),
    "panel_bytes": (c_int64, (c_int, c_int)),
    "group_size": (c_int, (c_int,)),
    "page_bytes": (c_int64, (POINTER(CacheStruct),)),
    "team_new": (c_void_p, (c_int,)),
    "team_free": (None, (c_void_p,)),
    "pack": (None, (c_void_p, POINTER(WeightStruct), c_void_p, c_int, c_int, c_int)),
    "program_new": (c_void_p, (c_void_p, POINTER(BatchStruct))),
    "program_free": (None, (c_void_p,)),
    "program_run": (None, (c_void_p, c_int, c_int, c_int, c_int, c_int)),
    "add_embed": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_int)),
    "add_norm": (
        None,
        (
            c_void_p,
            c_int,
            c_void_p,
            c_int,
            POINTER(NormStruct),
            c_int,
            POINTER(RowsStruct),
            c_int,
        ),
    ),
    "add_round": (
        None,
        (c_void_p, c_int, c_int, c_void_p, c_int, c_int, c_int, POINTER(RowsStruct)),
    ),
    "add_shrink": (None, (c_void_p, c_int, POINTER(LowRankStruct), c_void_p, c_int, c_int)),
    "add_update_embedded": (None, (c_void_p, POINTER(LowRankStruct), c_void_p, c_int)),
    "add_rotate_and_store": (None, (c_void_p, POINTER(RotationStruct))),
    "add_attend": (None, (c_void_p, POINTER(AttentionStruct))),
    "add_multiply": (
        None,
        (
            c_void_p,
            c_int,
            POINTER(WeightStruct),
            POINTER(RowsStruct),
            POINTER(OutputStruct),
            POINTER(LowRankStruct),
        ),
    ),
    "add_route": (
        None,
        (c_void_p, POINTER(RoutingStruct), c_void_p, c_int, POINTER(ChoicesStruct)),
    ),
    "add_sort_pairs": (None, (c_void_p, POINTER(ChoicesStruct))),
    "add_gather": (
        None,
        (c_void_p, c_int, POINTER(RowsStruct), POINTER(RowsStruct), POINTER(ChoicesStruct)),
    ),
    "add_weigh": (
        None,
        (c_void_p, c_void_p, c_int, c_int, c_int, POINTER(RowsStruct), POINTER(ChoicesStruct)),
    ),
    "add_multiply_experts": (
        None,
        (
            c_void_p,
            POINTER(WeightStruct),
            POINTER(RowsStruct),
            POINTER(OutputStruct),
            POINTER(ChoicesStruct),
        ),
    ),
    "add_multiply_heads": (
        None,
        (
            c_void_p,
            POINTER(HeadsStruct),
            POINTER(WeightStruct),
            POINTER(RowsStruct),
            POINTER(OutputStruct),
        ),
    ),
    "add_join_latents": (None, (c_void_p, POINTER(LatentsStruct))),
    "add_join_heads": (None, (c_void_p, POINTER(JoinedStruct), c_int, POINTER(RowsStruct))),
    "add_weighted": (None, (c_void_p, POINTER(WeightedStruct))),
}


class Library:
    """A compiled library; its functions are attributes, without their common prefix.

    handle:  as `build.load_library` returns it
    Raises NativeUnavailable when it is not what this module describes.
    """

    def __init__(self, handle: ctypes.CDLL) -> None:
        self.handle = handle
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(handle, f"remora_{name}")
            except AttributeError as error:
                raise NativeUnavailable(f"{error}; install remora anew") from error
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        for number, struct in enumerate(MIRRORED):
            size = self.struct_size(number)
            if size != ctypes.sizeof(struct):
                raise NativeUnavailable(
                    f"{struct.__name__} has {size} bytes in {handle._name} and "
                    f"{ctypes.sizeof(struct)} in Python; install remora anew"
                )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # tells type checkers that there are more

    @property
    def instructions(self) -> str:
        """What the library was compiled for, in words."""
        return bytes(self.instruction_set()).decode()


class Team:
    """Threads that stand by to run programs; the caller is one of them. One caller at a time.

    Raises NativeUnavailable when the system gives no more threads.
    """

    _pointer: int | None = None

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self._pointer = library.team_new(num_threads)
        if not self._pointer:
            raise NativeUnavailable(f"the system does not give {num_threads} threads; allow more")

    @property
    def pointer(self) -> int:
        """The library's team. Raises RuntimeError once the team has been closed."""
        if not self._pointer:
            raise RuntimeError("this engine has been closed; build another one")
        return self._pointer

    def close(self) -> None:
        """End the threads; nothing may run. Further calls do nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            self.library.team_free(pointer)

    def __del__(self) -> None:
        self.close()
