"""Whole models as step programs: beside torch's, and bit by bit however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.engine.graphs.step_program import StepProgram
from remora.engine.layers.experts import Experts
from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import MLP
from remora.engine.llm import LLM, SamplingParams
from remora.engine.models.decoder import DecoderModel
from remora.engine.runner.device import make_attention
from remora.engine.runner.eager import EagerForward
from remora.kernels.cpu.library import Library
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.graphs.stepping import (
    NUM_PAGES,
    PAGE_SIZE,
    QUANTIZED_FORMATS,
    Stepper,
    check_close,
    check_same_bits,
    make_eager,
    make_native,
    make_table,
)
from tests.engine.loaded import load
from tests.engine.models.families import make_family
from tests.engine.models.test_parity import make_llm, make_prompts
from tests.thinned import thinned
from tests.tiny_experts import EXPERT_FAMILIES

MODES = ("none", *QUANTIZED_FORMATS, "int8 in groups of 64", "float16", "float16 in int8")
# Norm of what the logits differ by, as a share of their own: what rounding activations costs these
# small models, which blow up what goes in.
# With float16 only K, V and the embeddings are rounded.
ERRORS = {
    "float32": 1e-5,
    "none": 0.08,
    "int8": 0.2,
    "int8 in groups of 64": 0.2,
    "int4": 0.2,
    "int4_pure": 0.2,
    "float16": 0.01,
    "float16 in int8": 0.2,
}


STEPS = ({0: 30, 1: 70}, {0: 1, 1: 1, 2: 20})


@pytest.mark.parametrize("family", ["llama", "llama-bias", "mistral", "qwen3"])
@pytest.mark.parametrize("mode", MODES)
def test_logits_are_close_to_those_of_torch_with_the_same_weights(
    mode: str, family: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    check_close(tiny_checkpoints(family), library, mode, STEPS, ERRORS[mode])


def make_large_activations(model: DecoderModel) -> None:
    """Multiply up projections, and divide down projections, by powers of two."""
    for block in model.blocks:
        assert isinstance(block.mlp, MLP)
        block.mlp.gate_up_proj.weight[block.mlp.gate_up_proj.weight.shape[0] // 2 :] *= 2.0**15
        block.mlp.down_proj.weight *= 2.0**-10


def test_a_float16_model_may_have_activations_beyond_float16(
    library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    model = load(path, torch.float16)
    make_large_activations(model)
    attention = make_attention(model, make_plan(page_size=PAGE_SIZE), NUM_PAGES)
    in_torch = Stepper(EagerForward(model, attention, page_size=PAGE_SIZE), make_table())
    assert not in_torch.step({0: 30}).isfinite().all()

    check_close(path, library, "float16", STEPS, ERRORS["float16"], prepare=make_large_activations)


NATIVE_FAMILIES = (
    *("cohere-head-norms", "cohere2", "falcon-1b-alibi", "falcon-40b", "falcon-7b", "gemma"),
    *("gemma2", "gemma3", "glm4", "gpt-neox", "gpt-neox-sequential", "gpt2", "granite"),
    *("internlm2", "minicpm", "ministral3", "olmo2", "phi", "phi-head-norms", "phi4-partial"),
    *("smollm3", "stablelm", "stablelm-parallel", "starcoder2"),
)
FAMILIES_IN_ALL_FORMATS = ("granite", "gemma2", "gemma3", "glm4", "olmo2", "gpt-neox", "gpt2")


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_logits_of_every_kind_of_block_are_close_to_those_of_torch(
    family: str, library: Library, tmp_path: Path
) -> None:
    path, _ = make_family(tmp_path, family)
    modes = ("float32", *MODES) if family in FAMILIES_IN_ALL_FORMATS else ("float32",)
    for mode in modes:
        check_close(path, library, mode, STEPS, ERRORS[mode], hidden=True)


@pytest.mark.parametrize(
    ("family", "mode"), thinned(product(EXPERT_FAMILIES, ("float32", *MODES)), 3)
)
def test_logits_of_experts_are_close_to_those_of_torch(
    family: str, mode: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    """Where activations are rounded, a row now and then chooses another expert; most do not."""
    limit = 1e-5 if mode == "float32" else 0.2
    native = make_native(tiny_checkpoints(family), library, mode)
    exact = make_eager(tiny_checkpoints(family), library, mode)
    for counts in ({0: 30, 1: 50, 2: 9, 3: 4}, {0: 1, 1: 1, 2: 1, 3: 1}):
        found, expected = native.step(counts), exact.step(counts)
        assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < limit
    native.forward.close()


def test_of_experts_those_are_counted_that_a_token_reads(
    library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_experts_per_tok": 2}
    sizes = []
    for number in (4, 8, 16):
        path = tiny_checkpoints("mixtral", num_local_experts=number, **shape)
        native = make_native(path, library)
        assert isinstance(native.forward, StepProgram)
        sizes.append(native.forward.weight_bytes)
        native.forward.close()

    assert sizes[0] == sizes[1] == sizes[2]  # routers take a panel each


def test_what_shared_experts_count_by_is_a_weight_that_a_token_reads(
    library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("qwen2-moe")
    gates: list[Linear] = []

    def without(model: DecoderModel) -> None:
        for block in model.blocks:
            if isinstance(block.mlp, Experts) and block.mlp.shared_gate is not None:
                gates.append(block.mlp.shared_gate)
                block.mlp.shared_gate = None

    whole, less = make_native(path, library), make_native(path, library, prepare=without)

    assert isinstance(whole.forward, StepProgram)
    assert isinstance(less.forward, StepProgram)
    a_panel = 64 * gates[0].weight.shape[1] * 4
    assert whole.forward.weight_bytes - less.forward.weight_bytes == len(gates) * a_panel
    for stepper in (whole, less):
        stepper.forward.close()


@pytest.mark.parametrize(
    ("family", "mode"), thinned(product(("llama", *EXPERT_FAMILIES), ("float32", *MODES)), 3)
)
def test_logits_are_the_same_bits_in_chunks_and_company(
    family: str, mode: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    check_same_bits(partial(make_native, tiny_checkpoints(family), library, mode))


@pytest.mark.parametrize("mode", MODES)
def test_logits_asked_for_afterwards_are_those_of_the_step(
    mode: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    native = make_native(tiny_checkpoints("llama"), library, mode)

    last = native.step({0: 40, 1: 30})
    again = native.forward.logits(30, 70).clone()

    # Rows come in order, and the last logits of each were asked for in the step.
    assert torch.equal(native.forward.logits(39, 40), last[:1])
    assert torch.equal(again[-1:], last[1:])
    assert torch.equal(again[9:10], last[:1])
    native.forward.close()


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_gives_up_its_weight_and_not_the_embedding_s(
    is_tied: bool, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama", tie_word_embeddings=is_tied)
    weights: dict[str, tuple[Tensor, Tensor]] = {}  # as they are in the end, and were before

    def remember(model: DecoderModel) -> None:
        head, embedding = model.head.linear.weight, model.embedding.weight
        weights.update(head=(head, head.clone()), embedding=(embedding, embedding.clone()))
        assert (list(model.head.tensors()) == []) == is_tied

    make_native(path, library, prepare=remember).forward.close()

    assert torch.equal(*weights["embedding"])
    assert torch.equal(*weights["head"]) == is_tied


@pytest.mark.parametrize("mode", ["float32", "none", "int8"])
@pytest.mark.parametrize("family", ["gemma2", "olmo2", "gpt-neox"])
def test_other_blocks_too_give_the_same_bits_in_chunks_and_company(
    family: str, mode: str, library: Library, tmp_path: Path
) -> None:
    path, _ = make_family(tmp_path, family)
    check_same_bits(partial(make_native, path, library, mode))


def test_closing_twice_is_closing_once(library: Library, tiny_checkpoints: TinyCheckpoints) -> None:
    native = make_native(tiny_checkpoints("llama"), library)
    native.step({0: 3})

    native.forward.close()
    native.forward.close()


GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=2)
CUTS: dict[str, dict[str, Any]] = {
    "chunks of 7": {"prefill_chunk_tokens": 7, "max_step_tokens": 40},
    "unchunked": {"prefill_chunk_tokens": 512, "max_step_tokens": 1024},
    "two threads": {"num_threads": 2},
    "pages of 64": {"page_size": 64},
    "no prefix cache": {"prefix_cache": False},
}


def generate(llm: LLM, prompts: list[list[int]]) -> Iterator[tuple[list[int], list[float]]]:
    """Yield ids and log-probabilities, which show every bit of the logits."""
    for generation in llm.generate(prompts, GREEDY):
        assert generation.logprobs is not None
        yield generation.token_ids, [line.logprob for line in generation.logprobs]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        ("bfloat16", "none"),
        *(("bfloat16", mode) for mode in QUANTIZED_FORMATS),
        ("float16", "none"),
    ],
)
def test_generation_is_the_same_to_the_bit_however_the_work_is_cut(
    mode: str, dtype: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    prompts = make_prompts([3, 17, 40, 80, 64, 31])
    make = partial(
        make_llm,
        tiny_checkpoints("llama"),
        dtype=dtype,
        quantization=mode,
        cpu_kernels="native",
    )
    llm = make(prefix_cache=False)
    expected = [next(generate(llm, [prompt])) for prompt in prompts]

    for name, options in CUTS.items():
        cut = make(**options)
        assert list(generate(cut, prompts)) == expected, name
        assert list(generate(cut, prompts[::-1])) == expected[::-1], f"{name}, cached"
        cut.close()
    llm.close()


@pytest.mark.parametrize(("mode", "is_rounded"), [("none", False), ("int8", False), (None, True)])
def test_logits_are_rounded_to_the_model_s_dtype_by_torch_only(
    mode: str | None, is_rounded: bool, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    if mode is None:
        model = load(path, torch.bfloat16)
        attention = make_attention(model, make_plan(page_size=PAGE_SIZE), NUM_PAGES)
        stepper = Stepper(EagerForward(model, attention, page_size=PAGE_SIZE), make_table())
    else:
        stepper = make_native(path, library, mode)
    logits = stepper.step({0: 9})

    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float()) is is_rounded


def test_logits_are_float32_sums_of_the_head_s_weights(
    library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    stepper = make_native(tiny_checkpoints("llama"), library)
    logits = stepper.step({0: 9})
    head = load(tiny_checkpoints("llama"), torch.bfloat16).head.linear.weight
    normal = stepper.forward.hidden(8, 9).bfloat16()

    torch.testing.assert_close(
        logits.double(), normal.double() @ head.double().T, atol=1e-5, rtol=1e-5
    )
