"""Call every kernel once on tiny inputs, for a memory checker to watch.

compute-sanitizer python tests/benchmarks/gpu/tiny_kernels.py cuda|cpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))


def main(device: str) -> None:
    from tests.benchmarks.gpu.cases import real_shapes
    from tests.benchmarks.gpu.interpreted import interpret_on_cpu
    from tests.benchmarks.gpu.stages.kernels import checked_cases

    if device == "cpu":
        interpret_on_cpu()
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    for case in (*checked_cases(tiny=True), *real_shapes.cases(tiny=True)):
        sys.stdout.write(f"{case.kernel} {case.shape}\n")
        sys.stdout.flush()
        case.make(torch.device(device), dtype).run()
        if device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
