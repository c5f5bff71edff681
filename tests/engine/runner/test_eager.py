"""Models divided between ranks, beside the same model on one rank, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from remora.configs.errors import ConfigError
from remora.engine.launch import make_table
from remora.engine.parallel.group import Alone
from remora.engine.parallel.layout import Layout
from remora.engine.runner.forward import BuiltForward, build_forward
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.loaded import load_f32
from tests.engine.models.test_parity import make_prompts
from tests.engine.parallel.runs import Run, run
from tests.thinned import thinned
from tests.tiny_models import FAMILIES, VOCAB_SIZE

# Logits are about 2; what differs is the order of sums in float32.
TOLERANCE = 2e-4
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp_size": 2},
    "tp4": {"tp_size": 4},
    "pp2": {"pp_size": 2, "micro_batches": 2},
    "pp3": {"pp_size": 3, "micro_batches": 4},
    "tp2 pp2": {"tp_size": 2, "pp_size": 2, "micro_batches": 2},
}
# Four ranks and fewer KV heads; shares of the inner layer and the vocabulary that differ.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
UNEVEN = {"intermediate_size": 131, "vocab_size": VOCAB_SIZE + 1}
ROPES = [family for family in FAMILIES if family.endswith("-rope")]
CASES = [(family, layout) for family in FAMILIES if family not in ROPES for layout in LAYOUTS]
CASES += [(family, "tp2 pp2") for family in ROPES]  # ranks see no difference between ropes

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = make_prompts([3, 60, 31, 40])
REQUESTS = {
    "greedy": (PROMPTS[0], GREEDY),
    "long": (PROMPTS[1], GREEDY),
    "scored": (PROMPTS[2], replace(GREEDY, prompt_logprobs=1)),
    "sampled": (PROMPTS[3], replace(GREEDY, temperature=0.9, top_k=8, seed=11)),
}


@pytest.fixture(scope="module")
def alone() -> Callable[[Path], Run]:
    """What one rank makes of a model, computed once."""
    return cache(partial(run, requests=REQUESTS))


@pytest.mark.observes("parallel.tp_size", "parallel.pp_size")
@pytest.mark.parametrize(("family", "layout"), thinned(CASES, 2))
def test_ranks_together_give_what_one_rank_gives(
    family: str,
    layout: str,
    alone: Callable[[Path], Run],
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints(family, **HEADS, **UNEVEN)
    expected = alone(path)

    found = run(path, REQUESTS, **LAYOUTS[layout])

    assert len(found.steps) == len(expected.steps)
    for logits, exact in zip(found.steps, expected.steps, strict=True):
        torch.testing.assert_close(logits, exact, atol=TOLERANCE, rtol=0)
    # With other weights a tie might be broken otherwise; with these the best stands clear.
    assert expected.margin() > TOLERANCE
    assert found.token_ids == expected.token_ids
    assert found.prompt_logprobs.keys() == expected.prompt_logprobs.keys()
    for name, lines in expected.prompt_logprobs.items():
        assert found.prompt_logprobs[name] == pytest.approx(lines, abs=TOLERANCE)
    assert len(expected.prompt_logprobs["scored"]) == len(REQUESTS["scored"][0]) - 1


@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_ranks_that_share_layers_have_the_hidden_states_of_one(
    layout: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama", **HEADS, **UNEVEN)
    requests = {"shown": (PROMPTS[1], replace(GREEDY, hidden_states=True))}
    expected, found = run(path, requests), run(path, requests, **LAYOUTS[layout])
    assert len(expected.hidden_states["shown"]) == len(PROMPTS[1]) + 5
    assert found.hidden_states["shown"] == pytest.approx(
        expected.hidden_states["shown"], abs=TOLERANCE
    )


def test_smollm2_on_three_ranks_says_what_it_says_on_one(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    requests = {
        question: (
            tokenizer.encode(
                tokenizer.render_chat([{"role": "user", "content": question}]),
                add_special_tokens=False,
            ),
            SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
        )
        for question in ("What is the capital of France?", "Write a haiku about the sea.")
    }

    alone = run(smollm2_path, requests)
    together = run(smollm2_path, requests, tp_size=3)

    for logits, exact in zip(together.steps, alone.steps, strict=True):
        # Logits reach 30 here, over 30 layers.
        torch.testing.assert_close(logits, exact, atol=1e-3, rtol=0)
    assert alone.margin() > 1e-3
    assert together.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("layout", "dtype"), [("tp2 pp2", "bfloat16"), ("pp3", "bfloat16"), ("tp2", "float16")]
)
def test_half_precision_stays_near_float32(
    layout: str, dtype: str, alone: Callable[[Path], Run], tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("qwen3", **HEADS, **UNEVEN)
    exact = alone(path).steps[0]

    logits = run(path, REQUESTS, dtype=dtype, **LAYOUTS[layout]).steps[0]

    assert logits.dtype == torch.float32
    # bfloat16 has 8 bits: errors of a few per cent of a logit's spread over three layers.
    assert (logits - exact).abs().mean() < 0.05 * exact.std()


class Stage(Alone):
    """A Group that is never used: the second of two ranks."""

    layout = Layout(rank=1, tp_size=2)


@pytest.mark.parametrize(
    ("kernels", "quantization", "message"),
    [
        ("native", "none", "engine.cpu_kernels is native, but native kernels run a model on one"),
        ("auto", "int8", "model.quantization = int8 needs the native CPU kernels: native kernels"),
    ],
)
def test_what_one_rank_only_can_do_is_refused(
    kernels: str, quantization: str, message: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_share(tiny_checkpoints("llama"), cpu_kernels=kernels, quantization=quantization)


def test_on_cpus_ranks_compute_in_torch_and_say_why(tiny_checkpoints: TinyCheckpoints) -> None:
    built = build_share(tiny_checkpoints("llama"), cpu_kernels="auto")

    assert built.description == (
        "torch, which is slower, because native kernels run a model on one rank, and "
        "parallel.tp_size * pp_size is 2"
    )
    # A step reads this rank's share; of the embedding it looks up rows.
    layer = 96 * (3 + 1 + 1) * 16 + 48 * 96 + 3 * 96 * 64 + 2 * 96
    assert built.step_weight_bytes == 4 * (3 * layer + 96 + 256 * 96)


def build_share(path: Path, **plan_changes: Any) -> BuiltForward:
    """Build the forward pass of the second of two ranks."""
    plan = make_plan(tp_size=2, **plan_changes)
    model = load_f32(path, layout=Stage.layout)
    return build_forward(model, plan, make_table(plan), path, Stage())
