"""Time of a layer of experts on this CPU: by how many experts its tokens go through, of how many.

    python tests/benchmarks/experts.py [--experts 64] [--hidden 1024] [--inner 512]

If only chosen experts are touched, a token's time follows the experts that it goes through, and not
those there are. The bound is reading the weights of the chosen ones once, at the speed at which the
dense product of all of them reads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from remora.engine.layers.experts import Experts
from remora.engine.models.config import ExpertsConfig
from remora.kernels.moe_rules import Routing


def median_ms(run: Callable[[], object], repeats: int = 15) -> float:
    """Return the median time of a call."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 2] * 1e3


def make_layer(experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> Experts:
    config = ExpertsConfig(num_experts=experts, size=inner, routing=Routing(top_k=top_k))
    layer = Experts(config, hidden, dtype=dtype, device="cpu")
    for shard in dict(layer.tensors("")).values():
        shard.memory.normal_(0.0, hidden**-0.5)
    layer.pack()
    return layer


@torch.inference_mode()
def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.set_num_threads(1)
    print("experts  of a token  tokens  ms")
    for experts in (args.experts // 4, args.experts):
        for top_k in (1, 4, 8):
            layer = make_layer(experts, top_k, args.hidden, args.inner, dtype)
            for tokens in (1, 16, 256):
                x = torch.randn(tokens, args.hidden).to(dtype)
                took = median_ms(partial(layer, x))
                print(f"{experts:7}  {top_k:10}  {tokens:6}  {took:.2f}")


if __name__ == "__main__":
    main()
