"""Writes quantised modules with the packages that define their formats, and what they mean by them.

    python make.py

needs compressed-tensors, torchao and bitsandbytes, which nothing else here does. Each file has the
tensors of one module, `expected`, which is its weight as the package dequantises it, and in its
metadata the package's version and the settings of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as portable
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    quantize_,
)

HERE = Path(__file__).parent
MODULE = "model.layers.0.mlp.down_proj"
OUTPUTS, INPUTS = 24, 160
Made = tuple[dict[str, Any], dict[str, Tensor], Tensor]

CT: dict[str, tuple[str, dict[str, Any]]] = {
    "int4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4-group-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int3-group-asymmetric": (
        "pack-quantized",
        {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int8-group": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "float8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ),
}


def main() -> None:
    """Write every file anew."""
    for name, package, made in [
        *((f"ct-{name}", "compressed-tensors", ct(*CT[name])) for name in CT),
        *((f"torchao-{name}", "torchao", made) for name, made in torchao()),
        *((f"bnb-{name}", "bitsandbytes", made) for name, made in bitsandbytes()),
    ]:
        settings, tensors, expected = made
        whole = {f"{MODULE}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        metadata = {"made by": f"{package} {version(package)}", "settings": json.dumps(settings)}
        save_file(
            whole | {"expected": expected.contiguous()}, HERE / f"{name}.safetensors", metadata
        )


def weight(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return numbers of which no two groups have the same range."""
    torch.manual_seed(0)
    return (torch.randn(OUTPUTS, INPUTS) * torch.rand(OUTPUTS, 1) * 0.1 + 0.01).to(dtype)


def ct(format: str, weights: dict[str, Any]) -> Made:
    """Compress and decompress a module; scales are bfloat16, as those of most checkpoints."""
    args, plain = QuantizationArgs(**weights), weight()
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
    divisor = {}
    grouped = blocks(plain, args)
    if weights["strategy"] == "tensor_group":
        divisor = {"global_scale": generate_gparam(plain.min(), plain.max())}
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, **divisor)
    parts = {"weight": plain, "weight_scale": scale, "weight_zero_point": zero}
    parts |= {f"weight_{key}": tensor for key, tensor in divisor.items()}
    compressor = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(parts, scheme)
    groups = {"group_0": json.loads(scheme.model_dump_json(exclude_none=True))}
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    return settings, stored, compressor.decompress(stored, scheme)["weight"]


def blocks(plain: Tensor, args: QuantizationArgs) -> Tensor:
    """Return the numbers that share a scale as the last axis, after the scales' axes."""
    if args.strategy == "tensor":
        return plain.view(1, -1)
    if args.strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(plain, (0, -INPUTS % wide, 0, -OUTPUTS % high))
        cut = padded.view(len(padded) // high, high, -1, wide)
        return cut.transpose(1, 2).flatten(2)
    return plain.view(OUTPUTS, -1, args.group_size or INPUTS)


def torchao() -> Iterator[tuple[str, Made]]:
    """Yield what torchao's weight-only tensors are saved as in safetensors files."""
    for name, config in {
        "int8": Int8WeightOnlyConfig(version=2),
        "int8-group": Int8WeightOnlyConfig(version=2, granularity=PerGroup(32)),
        "float8": Float8WeightOnlyConfig(version=2),
    }.items():
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16)
        linear.weight = torch.nn.Parameter(weight())
        model = torch.nn.Sequential(linear)
        quantize_(model, config)
        named, _ = flatten_tensor_state_dict({f"{MODULE}.weight": linear.weight})
        stored = {key.removeprefix(f"{MODULE}."): tensor for key, tensor in named.items()}
        yield name, ({"quant_method": "torchao"}, stored, linear.weight.dequantize())


def bitsandbytes() -> Iterator[tuple[str, Made]]:
    """Yield nf4 and fp4, and nf4 with nested scales, as transformers saves them; and int8.

    The portable code dequantises: with AVX-512, 0.50.2 repeats scales wrongly where runs of 64
    cross rows, as here.
    """
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for kind, is_nested in (("nf4", False), ("nf4", True), ("fp4", False)):
        codes, state = bnb.quantize_4bit(
            weight(torch.float32), quant_type=kind, blocksize=64, compress_statistics=is_nested
        )
        parts = {f"weight.{key}": each for key, each in state.as_dict(packed=True).items()}
        scales = state.absmax
        if is_nested:
            scales = bnb.dequantize_blockwise(scales, state.state2) + state.offset
        plain = portable(codes.flatten(), scales, state.code, 64, state.shape, state.dtype)
        yield kind + "-nested" * is_nested, (settings, {"weight": codes, **parts}, plain)
    codes, scales, _ = bnb.int8_vectorwise_quant(weight(torch.float16))
    plain = bnb.int8_vectorwise_dequant(codes, scales)
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    yield "int8", ({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, plain)


if __name__ == "__main__":
    main()
