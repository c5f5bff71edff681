"""Write a GGUF file with random weights, in a format that llama.cpp's own tool rounds to.

    python -m tests.benchmarks.peers.random_gguf OUT.gguf --shape 0.6b --quant q4_k_m

The shapes are Llama's, with rows that are multiples of 256, which K-quants need; the tokenizer is
that of the packaged SmolLM2. Speed depends on shapes and formats, not on what the weights say.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from remora.engine.weights.smollm2 import INSTALL, PACKAGE, find_packaged_gguf
from tests.benchmarks.peers.peers import PeerError, llama_tool

HEAD_DIM = 64
WEIGHT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama; the head is tied to the embedding."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_kv_heads: int

    @property
    def num_heads(self) -> int:
        return self.hidden_size // HEAD_DIM

    def tensors(self, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of all tensors."""
        hidden, kv = self.hidden_size, self.num_kv_heads * HEAD_DIM
        yield "token_embd.weight", (vocab_size, hidden)
        yield "output_norm.weight", (hidden,)
        for layer in range(self.num_layers):
            for name, shape in (
                ("attn_norm", (hidden,)),
                ("attn_q", (hidden, hidden)),
                ("attn_k", (kv, hidden)),
                ("attn_v", (kv, hidden)),
                ("attn_output", (hidden, hidden)),
                ("ffn_norm", (hidden,)),
                ("ffn_gate", (self.intermediate_size, hidden)),
                ("ffn_up", (self.intermediate_size, hidden)),
                ("ffn_down", (hidden, self.intermediate_size)),
            ):
                yield f"blk.{layer}.{name}.weight", shape


SHAPES = {
    "0.6b": Shape(num_layers=28, hidden_size=1280, intermediate_size=4096, num_kv_heads=5),
    "1.5b": Shape(num_layers=28, hidden_size=2048, intermediate_size=6144, num_kv_heads=8),
}


def write_bf16(file: Path, shape: Shape) -> None:
    """Write the model in bfloat16, tensor by tensor."""
    packaged = gguf.GGUFReader(find_packaged_gguf(PACKAGE, INSTALL))
    vocab_size = len(packaged.fields["tokenizer.ggml.tokens"].contents())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, stored in packaged.fields.items():
        if name.startswith("tokenizer."):
            kinds = [*stored.types, None]
            writer.add_key_value(name, stored.contents(), kinds[0], kinds[1])
    generator = np.random.default_rng(0)
    for name, size in shape.tensors(vocab_size):
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
            continue
        values = generator.standard_normal(size, np.float32) * np.float32(WEIGHT_STD)
        numbers = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def main() -> None:
    """Write what the command line says. Raises PeerError."""
    parser = argparse.ArgumentParser(description="Write a GGUF file with random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--quant", default="q4_k_m")
    arguments = parser.parse_args()
    if arguments.quant == "bf16":
        write_bf16(arguments.out, SHAPES[arguments.shape])
        return
    source = arguments.out.with_suffix(".bf16")
    write_bf16(source, SHAPES[arguments.shape])
    command = [llama_tool("llama-quantize"), source, arguments.out, arguments.quant.upper(), "2"]
    done = subprocess.run([str(part) for part in command], stdout=sys.stderr)
    source.unlink()
    if done.returncode != 0:
        raise PeerError("llama-quantize failed; its reason is above")


if __name__ == "__main__":
    main()
