"""What beam search costs: 8 beams and 8 sampled sequences of one prompt, in turns.

    python tests/benchmarks/scheduling/beams.py [MODEL] [--rounds 5] [--beams 8]

Both arms compute the same number of tokens. Prints the seconds of each round and the median ratio,
which must not be above 1.3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from remora.engine.llm import LLM, BeamParams, SamplingParams

PROMPT = "The most remarkable thing about the history of the lighthouse is that "
NUM_TOKENS = 128
MAX_RATIO = 1.3


def seconds(llm: LLM, params: SamplingParams) -> float:
    """Generate once; returns the seconds, prefill included."""
    started = time.perf_counter()
    (answer,) = llm.generate(PROMPT * 8, params)
    took = time.perf_counter() - started
    lengths = {len(completion.token_ids) for completion in answer.completions}
    if lengths != {NUM_TOKENS}:
        raise SystemExit(f"outputs have {lengths} tokens, not {NUM_TOKENS}: arms do not compare")
    return took


def main() -> None:
    """Measure both arms."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beams", type=int, default=8)
    options = parser.parse_args()
    llm = LLM(options.model, show_progress=False, quantization=options.quantization)
    width = options.beams
    drawn = SamplingParams(max_tokens=NUM_TOKENS, n=width, ignore_eos=True, seed=1)
    beams = SamplingParams(
        max_tokens=NUM_TOKENS, n=width, ignore_eos=True, beams=BeamParams(width=width)
    )
    for params in (drawn, beams):
        seconds(llm, params)  # touches what is used first
    ratios = []
    for _ in range(options.rounds):
        sampled, searched = seconds(llm, drawn), seconds(llm, beams)
        ratios.append(searched / sampled)
        sys.stdout.write(f"{width} sampled {sampled:.2f} s, {width} beams {searched:.2f} s\n")
    ratio = statistics.median(ratios)
    sys.stdout.write(f"ratio {ratio:.3f}, at most {MAX_RATIO} is asked\n")
    llm.close()
    if ratio > MAX_RATIO:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
