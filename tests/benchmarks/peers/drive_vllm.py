"""Run a job on vLLM's offline API; started by `offline.py` inside vLLM's environment.

Reads the job from standard input, writes the seconds of each run to standard output:
    {"model", "threads", "options", "runs": [{"prompts": [[id, ...], ...], "max_tokens": n}, ...]}
    {"load_s": x, "seconds": [x, ...]}
Whatever vLLM and its processes say goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    # vLLM's own processes log to descriptor 1, so it is the descriptor that has to move.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    from vllm import LLM  # type: ignore[import-not-found]

    llm = LLM(model=job["model"], dtype="bfloat16", disable_log_stats=True, **job["options"])
    load_s = time.perf_counter() - started
    seconds = [timed_run(llm, run["prompts"], run["max_tokens"]) for run in job["runs"]]
    json.dump({"load_s": load_s, "seconds": seconds}, answer)
    answer.close()


def timed_run(llm: Any, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds to answer all prompts at once, greedily, each with exactly `max_tokens`."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    started = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if len(outputs) != len(prompts) or lengths != {max_tokens}:
        raise RuntimeError(
            f"expected {len(prompts)} answers of {max_tokens} tokens, "
            f"found {len(outputs)} of {sorted(lengths)}"
        )
    return elapsed


if __name__ == "__main__":
    main()
