"""Generate for many prompts in a plain script: no Ray, no HTTP."""

from remora import LLM, SamplingParams

prompts = ["The capital of France is", "The capital of Japan is", "Water boils at"]

with LLM(model="smollm2-135m-instruct", kv_memory="512MiB") as llm:
    for answer in llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0)):
        print(f"{answer.prompt!r} -> {answer.text!r} ({answer.finish_reason})")
