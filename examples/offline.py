"""Generate for many prompts in a plain script: no Ray, no HTTP."""

from remora.engine.llm import LLM, SamplingParams

llm = LLM(model="smollm2-135m-instruct", kv_memory="512MiB")

prompts = ["The capital of France is", "The capital of Japan is", "Water boils at"]
for prompt, generation in zip(
    prompts, llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0)), strict=True
):
    print(f"{prompt!r} -> {generation.text!r} ({generation.finish_reason})")

llm.close()
