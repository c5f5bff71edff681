"""What transformers' continuous batching does with prompts that `serving.py` gives our engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.benchmarks.gpu.built import DTYPES, checkpoint
from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.loads import LOADS, TINY_LOADS, Load
from tests.benchmarks.gpu.rows import TOKENS_PER_S, Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.shapes import config_of


def cases(setting: Setting) -> Iterator[Case]:
    name, config = config_of(setting.options["model"], tiny=setting.is_tiny)
    load = (TINY_LOADS if setting.is_tiny else LOADS)[0]
    about = Row(model=name, what=f"transformers, {load.name}", is_headline=True)
    yield Case(about, partial(rate, about, config, load, setting), 110.0)


def rate(about: Row, config: dict[str, Any], load: Load, setting: Setting) -> Iterator[Row]:
    """Answer a load of equal lengths, started and warm as our engine is."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    with checkpoint(config) as path, setting.torch_device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path),
            dtype=DTYPES[config["torch_dtype"]],
            attn_implementation="sdpa",
        ).eval()
    rows, prompt, output = len(load.prompts), load.prompts[0], load.answers[0]
    numbers = np.random.default_rng(1)
    # -1 is no token's id: nothing ends an answer before its length does.
    generation = GenerationConfig(
        max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Of a CPU's memory it would take most.
    room = {"num_blocks": 8, "max_batch_tokens": 256} if setting.is_tiny else {}
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**room),
        timeout=5,
    ) as manager:

        def answer(num_output: int) -> float:
            prompts = numbers.integers(0, 500, (rows, prompt)).tolist()
            started = time.perf_counter()
            manager.add_requests(inputs=prompts, max_new_tokens=num_output)
            lengths: list[int] = []
            while len(lengths) < rows:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    lengths.append(len(result.generated_tokens))
                elif not manager.is_running():
                    raise RuntimeError("transformers' thread has ended")
            if set(lengths) != {num_output}:
                raise RuntimeError(f"transformers made answers of {sorted(set(lengths))} tokens")
            return time.perf_counter() - started

        answer(4)
        details = {"attention": str(model.config._attn_implementation)}
        yield about.found(rows * output / answer(output), TOKENS_PER_S, details=details)
