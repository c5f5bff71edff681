"""The loaded native library: its functions with their argument types, and the thread team.

Knows pointers and structures. Knows nothing of models or of how the library is compiled.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

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
    """Number formats of packed weights, rows and tensors; see src/format.h."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8 = 3
    Q4 = 4
    I4_128 = 8
    I4Z_32 = 9
    I4Z_64 = 10
    I4Z_128 = 11
    I8_128 = 12
    I8Z_64 = 13
    I8Z_32 = 14
    Q4_0 = 32
    Q4_1 = 33
    Q5_0 = 34
    Q5_1 = 35
    Q8_0 = 36
    Q2_K = 37
    Q3_K = 38
    Q4_K = 39
    Q5_K = 40
    Q6_K = 41
    IQ4_NL = 42
    IQ4_XS = 43
    MXFP4 = 48
    F8 = 64
    T4 = 65

    @staticmethod
    def of(dtype: torch.dtype) -> Format:
        """Return the format of a tensor's numbers. Raises TypeError for a dtype without one."""
        try:
            return _FORMATS[dtype]
        except KeyError:
            raise TypeError(
                f"expected a float32, bfloat16 or float16 tensor, got {dtype}"
            ) from None

    @property
    def is_grouped(self) -> bool:
        """Whether weights and activations are quantised in groups."""
        return Format.Q8 <= self < Format.F8

    @property
    def of_rows(self) -> Format:
        """Format of the rows that a weight of this format is multiplied with."""
        return _ROWS.get(self, self)


_FORMATS = {
    torch.float32: Format.F32,
    torch.bfloat16: Format.BF16,
    torch.float16: Format.F16,
}
# Formats of rows, where they are not the weight's. int8 rows differ in their groups and blocks.
_ROWS = {
    Format.F16: Format.F32,
    Format.F8: Format.BF16,
    Format.T4: Format.BF16,
    Format.I4Z_32: Format.Q4,
    Format.I4Z_64: Format.Q8,
    Format.I4Z_128: Format.I4_128,
    Format.I8_128: Format.I4_128,
    Format.I8Z_64: Format.Q8,
    Format.I8Z_32: Format.Q4,
    Format.Q4_0: Format.Q4,
    Format.Q4_1: Format.Q4,
    Format.Q5_0: Format.Q4,
    Format.Q5_1: Format.Q4,
    Format.Q8_0: Format.Q4,
    Format.Q4_K: Format.Q4,
    Format.Q5_K: Format.Q4,
    Format.IQ4_NL: Format.Q4,
    Format.IQ4_XS: Format.Q4,
    Format.MXFP4: Format.Q4,
    Format.Q2_K: Format.Q6_K,
    Format.Q3_K: Format.Q6_K,
}


class KvFormat(IntEnum):
    """How K and V are cached; see src/kv_format.h."""

    PLAIN = 0
    INT8 = 1
    E4M3 = 2
    E5M2 = 3

    @staticmethod
    def of(dtype: torch.dtype | None) -> KvFormat:
        """Return the format of 8-bit numbers; None = unquantised."""
        return KvFormat.PLAIN if dtype is None else _KV_FORMATS[dtype]


_KV_FORMATS = {
    torch.int8: KvFormat.INT8,
    torch.float8_e4m3fn: KvFormat.E4M3,
    torch.float8_e5m2: KvFormat.E5M2,
}


class Epilogue(IntEnum):
    """How a product stores its result; see src/linear.h."""

    STORE = 0
    ADD = 1
    GATED = 2


class Activation(IntEnum):
    """Function applied to a product or to its gate before it is stored; see src/activation.h."""

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
LANES = 16  # head_dim and blocks of gated columns are padded to a multiple of it

# Functions of the library by name, without the common prefix: results and arguments.
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "instruction_set": (c_char_p, ()),
    "struct_size": (c_int, (c_int,)),
    "bf16_product": (c_char_p, ()),
    "has_tiles": (c_bool, ()),
    "has_byte_products": (c_bool, ()),
    "measure_rates": (None, (c_void_p,)),
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
    "program_chunks": (None, (c_void_p, c_int, c_int, c_int, POINTER(c_int))),
    # The first five arguments are the team and the logits: address, stride, rows, vocabulary.
    "choose": (None, (c_void_p, c_void_p, c_int64, c_int, c_int, *[c_void_p] * 7)),
    "token_logprobs": (
        None,
        (c_void_p, c_void_p, c_int64, c_int, c_int, c_void_p, c_int, *[c_void_p] * 4),
    ),
    "mask_tokens": (None, (c_void_p, c_void_p, c_int64, c_int, c_int, c_void_p, c_void_p)),
}
# Operations: arguments of `add_<name>` after the program; there is no result.
_OPERATIONS: dict[str, tuple[type, ...]] = {
    "embed": (c_void_p, c_int, c_int, c_int, c_void_p, c_int),
    "norm": (c_int, c_void_p, c_int, POINTER(NormStruct), c_int, POINTER(RowsStruct), c_int),
    "round": (c_int, c_int, c_void_p, c_int, c_int, c_int, POINTER(RowsStruct)),
    "shrink": (c_int, POINTER(LowRankStruct), c_void_p, c_int, c_int),
    "update_embedded": (POINTER(LowRankStruct), c_void_p, c_int),
    "rotate_and_store": (POINTER(RotationStruct),),
    "attend": (POINTER(AttentionStruct),),
    "multiply": (
        c_int,
        *map(POINTER, (WeightStruct, RowsStruct, OutputStruct, LowRankStruct)),
    ),
    "route": (POINTER(RoutingStruct), c_void_p, c_int, POINTER(ChoicesStruct)),
    "sort_pairs": (POINTER(ChoicesStruct),),
    "gather": (c_int, POINTER(RowsStruct), POINTER(RowsStruct), POINTER(ChoicesStruct)),
    "weigh": (c_void_p, c_int, c_int, c_int, POINTER(RowsStruct), POINTER(ChoicesStruct)),
    "multiply_experts": tuple(
        map(POINTER, (WeightStruct, RowsStruct, OutputStruct, ChoicesStruct))
    ),
    "multiply_heads": tuple(map(POINTER, (HeadsStruct, WeightStruct, RowsStruct, OutputStruct))),
    "join_latents": (POINTER(LatentsStruct),),
    "join_heads": (POINTER(JoinedStruct), c_int, POINTER(RowsStruct)),
    "weighted": (POINTER(WeightedStruct),),
}


class Library:
    """A compiled library; its functions are attributes, without their common prefix.

    handle:  from `build.load_library`
    Raises NativeUnavailable when functions or structure sizes differ from this module's.
    """

    def __init__(self, handle: ctypes.CDLL) -> None:
        self.handle = handle
        operations = {
            f"add_{name}": (None, (c_void_p, *arguments)) for name, arguments in _OPERATIONS.items()
        }
        for name, (result, arguments) in {**_SIGNATURES, **operations}.items():
            try:
                function = getattr(handle, f"remora_{name}")
            except AttributeError as error:
                raise NativeUnavailable(f"{error}; reinstall remora") from error
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        for number, struct in enumerate(MIRRORED):
            size = self.struct_size(number)
            if size != ctypes.sizeof(struct):
                raise NativeUnavailable(
                    f"{struct.__name__} has {size} bytes in {handle._name} and "
                    f"{ctypes.sizeof(struct)} in Python; reinstall remora"
                )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # declares dynamic attributes to type checkers

    @property
    def name(self) -> str:
        """File name, which differs for other sources, compilers and instruction sets."""
        return Path(self.handle._name).name

    @property
    def instructions(self) -> str:
        """Name of the instruction set that the library was compiled for."""
        return bytes(self.instruction_set()).decode()

    def rates(self) -> dict[str, float]:
        """Measure what one thread multiplies, in GFLOP/s or GOP/s by name; takes milliseconds."""
        measured = (c_double * 5)()
        self.measure_rates(measured)
        how = bytes(self.bf16_product()).decode()
        names = ("float32", f"bfloat16 by {how}", "int8", "bfloat16 tiles", "int8 tiles")
        return {name: rate for name, rate in zip(names, measured, strict=True) if rate}


class Team:
    """Threads that run programs, the caller included. Serves one caller at a time.

    Raises NativeUnavailable when the system refuses to start the threads.
    """

    _pointer: int | None = None

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self._pointer = library.team_new(num_threads)
        if not self._pointer:
            raise NativeUnavailable(
                f"the system refused to start {num_threads} threads; raise its thread limit"
            )

    @property
    def pointer(self) -> int:
        """Address of the native team. Raises RuntimeError after `close`."""
        if not self._pointer:
            raise RuntimeError("this engine has been closed; build another one")
        return self._pointer

    def close(self) -> None:
        """End the threads. No program may be running; further calls do nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            self.library.team_free(pointer)

    def __del__(self) -> None:
        self.close()
