"""What holding outputs to a JSON schema costs: decode throughput with and without it.

    python tests/benchmarks/constraints.py [MODEL] [--quantization int8] [--rounds 5]

Both arms produce the same number of tokens from the same prompts, and take turns. Prints tokens
per second of each round, and the median ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from remora.engine.llm import LLM, Constraint, ConstraintKind, SamplingParams

BATCH, NUM_TOKENS = 16, 200
# So many items that none of the outputs comes to its end.
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string"}, "minItems": NUM_TOKENS},
    },
    "required": ["names"],
}
CONSTRAINT = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(SCHEMA))


def tokens_per_s(llm: LLM, params: SamplingParams, constraint: Constraint | None) -> float:
    """Generate for the whole batch; returns output tokens per second, prefill included."""
    prompts = [f"Answer in JSON: the names of many animals, list {i}." for i in range(BATCH)]
    started = time.perf_counter()
    answers = llm.generate(prompts, params, constraint=constraint)
    seconds = time.perf_counter() - started
    lengths = {len(answer.token_ids) for answer in answers}
    if lengths != {NUM_TOKENS}:
        raise SystemExit(f"outputs have {lengths} tokens, not {NUM_TOKENS}: arms do not compare")
    return BATCH * NUM_TOKENS / seconds


def main() -> None:
    """Measure greedy and sampled outputs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(options.model, show_progress=False, quantization=options.quantization)
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=temperature, seed=1, ignore_eos=True
        )
        tokens_per_s(llm, params, CONSTRAINT)  # compiles, and touches what is used first
        tokens_per_s(llm, params, None)
        ratios = []
        for _ in range(options.rounds):
            free = tokens_per_s(llm, params, None)
            held = tokens_per_s(llm, params, CONSTRAINT)
            ratios.append(held / free)
            sys.stdout.write(f"temperature {temperature}: free {free:.0f}, held {held:.0f} tok/s\n")
        sys.stdout.write(f"temperature {temperature}: {statistics.median(ratios):.1%} of free\n")
    llm.close()


if __name__ == "__main__":
    main()
