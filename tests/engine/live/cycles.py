"""What is left of sleep and waking: `python -m tests.engine.live.cycles KERNELS FOLDER CYCLES`.

Builds an engine of 50 MB of weights in a folder, lets it sleep and wake, and prints JSON, in bytes:

    used         weights and KV cache
    returned     what each sleep gave back
    asleep       anonymous memory in each sleep
    kv           the KV cache alone, and what a sleep of it alone gave back, `returned_kv`
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from remora.engine.live.rank import KV_CACHE, TAGS, HoldsPages
from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.weights.loader import whole_shapes
from tests.engine.live.running import PROMPTS, Running, build

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "bfloat16",
}
KV_TOKENS = 12_288  # of 8 kB each


def write_checkpoint(folder: Path) -> int:
    """Write the model's random weights; return their bytes."""
    (folder / "config.json").write_text(json.dumps(SIZES))
    generator = torch.Generator().manual_seed(1)
    model = DecoderModel(read_config(folder), dtype=torch.bfloat16, device="meta")
    tensors = {
        name: torch.randn(shape, generator=generator).mul(0.02).bfloat16()
        for name, shape in whole_shapes(model.tensors()).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def anonymous_bytes() -> int:
    """Return the memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def write_pages(running: Running) -> int:
    """Write to all pages, which takes memory as requests do; return the bytes."""
    forward = running.rank._holder.forward_pass
    assert isinstance(forward, HoldsPages)
    memories = forward.page_memory()
    for memory in memories:
        memory.view(torch.uint8).fill_(1)
    return sum(memory.nbytes for memory in memories)


async def cycles(kernels: str, folder: Path, num_cycles: int) -> dict[str, Any]:
    """Sleep and wake; return what was measured."""
    weight_bytes = write_checkpoint(folder)
    engine = {"cpu_kernels": kernels, "kv_tokens": KV_TOKENS, "max_step_tokens": 64}
    model = {"dtype": "bfloat16", "skip_tokenizer": True}
    running = Running(build(folder, engine=engine, model=model), folder / "updates")
    returned: list[int] = []
    asleep: list[int] = []
    try:
        wanted = await running.answer(PROMPTS[0], 4)
        for _ in range(num_cycles):
            write_pages(running)
            awake = anonymous_bytes()
            await running.live.sleep(frozenset(TAGS), "idle")
            asleep.append(anonymous_bytes())
            returned.append(awake - asleep[-1])
            await running.live.wake(frozenset(TAGS))
            assert await running.answer(PROMPTS[0], 4) == wanted
        kv_bytes = write_pages(running)
        awake = anonymous_bytes()
        await running.live.sleep(frozenset({KV_CACHE}), "idle")
        returned_kv = awake - anonymous_bytes()
    finally:
        running.close()
    return {
        "used": weight_bytes + kv_bytes,
        "returned": returned,
        "asleep": asleep,
        "kv": kv_bytes,
        "returned_kv": returned_kv,
    }


if __name__ == "__main__":
    kernels, folder, num_cycles = sys.argv[1:]
    print(json.dumps(asyncio.run(cycles(kernels, Path(folder), int(num_cycles)))))
