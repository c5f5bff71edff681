"""Run a job on transformers' continuous batching; started by `offline.py` inside its environment.

Same job and answer as `drive_vllm.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    batching = ContinuousBatchingConfig(**job["options"])
    load_s = time.perf_counter() - started
    seconds = [timed_run(model, batching, run["prompts"], run["max_tokens"]) for run in job["runs"]]
    json.dump({"load_s": load_s, "seconds": seconds}, answer)
    answer.close()


def timed_run(model: Any, batching: Any, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds to answer all prompts at once, greedily, each with exactly `max_tokens`."""
    from transformers import GenerationConfig

    # -1 is no token's id: nothing ends an answer before its length does.
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1)
    started = time.perf_counter()
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=batching,
        persistent_manager=True,
        max_new_tokens=max_tokens,
    )
    elapsed = time.perf_counter() - started
    lengths = {len(output.generated_tokens) for output in outputs.values()}
    if len(outputs) != len(prompts) or lengths != {max_tokens}:
        raise RuntimeError(
            f"expected {len(prompts)} answers of {max_tokens} tokens, "
            f"found {len(outputs)} of {sorted(lengths)}"
        )
    return elapsed


if __name__ == "__main__":
    main()
