"""Writes quantised modules with AutoAWQ, AutoGPTQ and ModelOpt, and what they mean by them.

    pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1    # unpack both into FOLDER
    python make_more.py FOLDER

also needs ModelOpt, which is imported. AutoAWQ and AutoGPTQ cannot be imported as a whole with
transformers 5: only the modules that pack are. Files are like those of make.py.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
MODULE = "model.layers.0.mlp.down_proj"
OUTPUTS, INPUTS, GROUP = 32, 128, 32
Made = tuple[dict[str, Any], dict[str, Tensor], Tensor]


def main() -> None:
    """Write every file anew."""
    folder = Path(sys.argv[1])
    for name, package, made in [
        ("awq", "autoawq 0.2.9", awq(folder)),
        *((f"gptq-{name}", "auto-gptq 0.7.1", made) for name, made in gptq(folder)),
        *((f"modelopt-{name}", "nvidia-modelopt 0.47.0", made) for name, made in modelopt()),
    ]:
        settings, tensors, expected = made
        whole = {f"{MODULE}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        metadata = {"made by": package, "settings": json.dumps(settings)}
        save_file(
            whole | {"expected": expected.contiguous()}, HERE / f"{name}.safetensors", metadata
        )


def module_of(folder: Path, name: str) -> ModuleType:
    """Import a module of a package in a folder without running the package's own imports."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        parent = ModuleType(".".join(parts[:count]))
        parent.__path__ = [str(folder.joinpath(*parts[:count]))]
        sys.modules.setdefault(parent.__name__, parent)
    return importlib.import_module(name)


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    made = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
    made.requires_grad_(False)
    made.weight.data = (torch.randn(OUTPUTS, INPUTS) * torch.rand(OUTPUTS, 1) * 0.1 + 0.01).half()
    return made


def ranges(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [outputs, groups] of an asymmetric rounding."""
    groups = weight.float().view(OUTPUTS, -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, (-low / scales).round().clamp(1, 2**bits - 1)


def awq(folder: Path) -> Made:
    """Pack with AutoAWQ's layout for its GEMM kernel."""
    packing = module_of(folder, "awq.modules.linear.gemm")
    plain = linear()
    scales, zeros = ranges(plain.weight, 4)
    packed = packing.WQLinear_GEMM.from_linear(plain, 4, GROUP, scales=scales.T, zeros=zeros.T)
    expected = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
    return settings | {"zero_point": True}, tensors, expected


def gptq(folder: Path) -> Iterator[tuple[str, Made]]:
    """Yield modules of 4 and 8 bits, with and without act-order, multiplied with a unit matrix."""
    packing = module_of(folder, "auto_gptq.nn_modules.qlinear.qlinear_cuda")
    for bits, has_order in ((4, False), (4, True), (8, False)):
        plain = linear()
        order = torch.arange(INPUTS) // GROUP
        if has_order:
            order = order[torch.randperm(INPUTS)]
        scales, zeros = ranges(plain.weight, bits)
        packed = packing.QuantLinear(bits, GROUP, INPUTS, OUTPUTS, bias=False)
        packed.pack(plain, scales, zeros, order.int())
        packed.autogptq_cuda_available = False
        expected = packed(torch.eye(INPUTS, dtype=torch.float16)).T
        settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP}
        settings |= {"desc_act": has_order, "sym": False}
        tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
        yield f"{bits}" + "-act-order" * has_order, (settings, tensors, expected)


def modelopt() -> Iterator[tuple[str, Made]]:
    """Yield a module of exported checkpoints."""
    for name, config in (("fp8", mtq.FP8_DEFAULT_CFG), ("nvfp4", mtq.NVFP4_DEFAULT_CFG)):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
        llama = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
        model = LlamaForCausalLM(llama).to(torch.bfloat16)
        mtq.quantize(model, config, lambda model: model(torch.randint(0, 128, (2, 16))))
        down = model.model.layers[0].mlp.down_proj
        plain = down.weight.detach().clone()
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(model, export_dir=folder)
            stored = load_file(Path(folder) / "model.safetensors")
            config_file = json.loads((Path(folder) / "config.json").read_text())
        tensors = {
            key.removeprefix(f"{MODULE}."): each
            for key, each in stored.items()
            if key.startswith(MODULE)
        }
        if name == "fp8":
            expected = (tensors["weight"].float() * tensors["weight_scale"]).bfloat16()
        else:
            made, scales, divisor = NVFP4QTensor.quantize(plain, 16)
            assert torch.equal(made._quantized_data, tensors["weight"])
            expected = made.dequantize(
                torch.bfloat16, scale=scales, double_scale=divisor, block_sizes={-1: 16}
            )
        yield name, (config_file["quantization_config"], tensors, expected)


if __name__ == "__main__":
    main()
