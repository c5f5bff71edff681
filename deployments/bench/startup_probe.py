"""A program that loads a model, generates one token, and reports the duration of each phase.

startup.py runs it with the `args` of a configuration as its only argument. It writes one JSON line.
"""

import json
import sys
import time

_BEGAN = time.perf_counter()


def main() -> None:
    """Load the model, generate a token, and report."""
    # Imported here to be measured: imports are the largest part of a start.
    from remora.configs.load import parse_args
    from remora.engine.launch import build_engine
    from remora.engine.types import Request, SamplingParams
    from remora.lora.setup import configured

    imported = time.perf_counter()
    config = parse_args(json.loads(sys.argv[1]))
    built = build_engine(config, adapting=configured(config.lora), show_progress=False)
    ready = time.perf_counter()
    prompt = built.tokenizer.encode("The capital of France is", add_special_tokens=True) or [0]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    built.engine.add(Request(request_id="first", prompt_ids=prompt, sampling=sampling))
    while built.engine.has_work:
        built.engine.step()
    phases = {"import": imported - _BEGAN, **built.phases}
    phases["rest of loading"] = ready - imported - sum(built.phases.values())
    phases["first token"] = time.perf_counter() - ready
    sys.stdout.write(json.dumps({"phases": phases}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()  # keep running until the parent has read the peak memory and closes the pipe
    built.engine.close()
