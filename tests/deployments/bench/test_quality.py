"""Quality of quantized weights: the statistics, the scores of the engine, and its limits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from remora.configs.environment import cache_dir
from remora.deployments.bench.quality import (
    TEXT,
    Agreement,
    compare,
    perplexity,
    read_text,
    score,
    windows,
)
from remora.deployments.bench.targets import read_target
from remora.deployments.cli.main import app
from remora.deployments.cli.terminal import Failure
from remora.engine.launch import build_engine
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import LogprobRows, TokenArray
from remora.kernels.cpu.build import NativeUnavailable, load_library
from tests.conftest import TinyCheckpoints
from tests.engine.models.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

Distributions = npt.NDArray[np.float64]

SETTINGS = ("engine.device=cpu", "engine.num_threads=1", "engine.kv_tokens=2048")
SENTENCE = "The quick brown fox adds 12 and 30, and a system of slots jumps over the lazy dog. "


def make_lines(probabilities: Distributions, token_ids: TokenArray, num_top: int) -> LogprobRows:
    """Return the rows of tokens [N] with distributions [N, V], as the engine computes them."""
    logprobs = np.log(probabilities)
    order = np.argsort(-logprobs, axis=1, kind="stable")
    lines = np.arange(len(token_ids))
    return LogprobRows(
        token_ids=token_ids,
        logprobs=logprobs[lines, token_ids].astype(np.float32),
        ranks=(np.argmax(order == token_ids[:, None], axis=1) + 1).astype(np.int32),
        top_ids=order[:, :num_top],
        top_logprobs=np.take_along_axis(logprobs, order, 1)[:, :num_top].astype(np.float32),
    )


def make_distributions(seed: int, *, num: int = 20, size: int = 50) -> Distributions:
    logits = np.random.default_rng(seed).normal(0, 2, (num, size))
    weights = np.exp(logits)
    shares: Distributions = weights / weights.sum(1, keepdims=True)
    return shares


def bench_quality(*arguments: str) -> dict[str, Any]:
    """Return the report of the command."""
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["bench", "quality", *arguments, *settings, "--json", "-"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.fixture
def native_kernels() -> None:
    """Skip without native kernels, which quantized weights need."""
    try:
        load_library(cache_dir() / "kernels")
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def uniform_model(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> Path:
    """A model whose tokens are equally likely, because its head is zero."""
    folder = tmp_path / "uniform"
    folder.mkdir()
    for file in tiny_checkpoints("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_perplexity_is_the_inverse_of_the_geometric_mean_probability() -> None:
    probabilities = np.array([[0.5, 0.5], [0.125, 0.875]])

    lines = make_lines(probabilities, np.array([0, 0]), 2)

    assert perplexity(lines) == pytest.approx(4.0)


def test_agreement_counts_the_likeliest_tokens_that_are_the_same() -> None:
    ids = np.zeros(4, int)
    ours = make_lines(np.array([[0.6, 0.4]] * 4), ids, 2)
    other = make_lines(np.array([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4], [0.8, 0.2]]), ids, 2)

    assert compare(ours, other).top1_share == 0.75
    assert compare(ours, ours) == Agreement(
        perplexity_ratio=1.0, perplexity_ratio_error=0.0, top1_share=1.0, kl_nats=0.0
    )


def test_the_ratio_is_that_of_the_perplexities_and_its_error_shrinks_with_the_text() -> None:
    ids = np.arange(20)
    ours = make_lines(make_distributions(1), ids, 5)
    other = make_lines(make_distributions(2), ids, 5)
    twice = [
        make_lines(np.tile(make_distributions(seed), (4, 1)), np.tile(ids, 4), 5) for seed in (1, 2)
    ]

    agreement, longer = compare(ours, other), compare(*twice)

    assert agreement.perplexity_ratio == pytest.approx(perplexity(other) / perplexity(ours))
    assert longer.perplexity_ratio == pytest.approx(agreement.perplexity_ratio)
    assert longer.perplexity_ratio_error == pytest.approx(agreement.perplexity_ratio_error / 2)


@given(seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)), num_top=st.integers(1, 50))
def test_divergence_is_exact_for_whole_distributions_and_never_too_high(
    seeds: tuple[int, int], num_top: int
) -> None:
    p, q = map(make_distributions, seeds)
    ids = np.arange(20)
    exact = float((p * np.log(p / q)).sum(1).mean())

    whole = compare(make_lines(p, ids, 50), make_lines(q, ids, 50)).kl_nats
    part = compare(make_lines(p, ids, num_top), make_lines(q, ids, num_top)).kl_nats

    assert whole == pytest.approx(exact, abs=1e-5)
    assert -1e-5 <= part <= exact + 1e-5


def test_windows_hold_the_whole_text_in_order(tiny_checkpoints: TinyCheckpoints) -> None:
    tokenizer = Tokenizer.load(tiny_checkpoints("llama"))
    ids = tokenizer.encode(SENTENCE * 5, add_special_tokens=False)

    cut = windows(tokenizer, SENTENCE * 5, 32)

    assert [token_id for window in cut for token_id in window] == ids
    assert {len(window) for window in cut[:-1]} == {32}
    with pytest.raises(Failure, match="at least 2"):
        windows(tokenizer, "a", 32)


def test_scores_are_those_of_transformers(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    built = build_engine(read_target(str(path), SETTINGS).config, show_progress=False)
    prompts = windows(built.tokenizer, SENTENCE * 3, 40)

    lines = score(built.engine, prompts)
    built.engine.close()

    oracle = Oracle(path)
    expected = np.concatenate([oracle.logprobs(prompt, 1).numpy() for prompt in prompts])
    likeliest = np.concatenate([oracle.logits(p).argmax(-1).numpy()[:-1] for p in prompts])
    np.testing.assert_allclose(lines.logprobs, expected, atol=2e-4)
    assert lines.top_ids[:, 0].tolist() == likeliest.tolist()


@pytest.mark.usefixtures("native_kernels")
def test_the_perplexity_of_a_uniform_model_is_its_vocabulary_size(uniform_model: Path) -> None:
    figures = bench_quality(str(uniform_model), "--modes", "int8")["figures"]

    assert figures["reference"]["perplexity"] == pytest.approx(VOCAB_SIZE, rel=1e-5)
    assert figures["int8"]["perplexity"] == pytest.approx(VOCAB_SIZE, rel=1e-5)
    assert figures["int8"]["kl_nats"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.usefixtures("native_kernels")
def test_all_modes_are_compared_with_the_reference(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(SENTENCE * 4)

    data = bench_quality(str(tiny_checkpoints("llama")), "--text", str(text))

    assert list(data["figures"]) == ["reference", "int8", "int4"]
    kl = {name: figures.get("kl_nats", 0.0) for name, figures in data["figures"].items()}
    assert 0 == kl["reference"] < kl["int8"] < kl["int4"]
    assert data["settings"]["text"] == "text.txt"


def test_another_reference(tiny_checkpoints: TinyCheckpoints) -> None:
    against = ["--against", "engine.cpu_kernels=torch", "--modes", "none"]

    figures = bench_quality(str(tiny_checkpoints("llama")), *against)["figures"]

    assert list(figures) == ["reference", "none"]
    assert figures["none"]["perplexity_ratio"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_text_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(Failure, match=r"t\.txt"):
        read_text(path)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("native_kernels")
def test_quantized_weights_of_the_built_in_model_keep_its_quality(smollm2_path: Path) -> None:
    whole = read_text(TEXT)
    text = whole[: len(whole) // 3]  # all of it takes minutes
    views = {}
    for mode in ("none", "int8", "int4"):
        settings = [*SETTINGS, f"model.quantization={mode}"]
        built = build_engine(read_target(str(smollm2_path), settings).config, show_progress=False)
        views[mode] = score(built.engine, windows(built.tokenizer, text, 512))
        built.engine.close()

    int8, int4 = (compare(views["none"], views[mode]) for mode in ("int8", "int4"))

    assert 10 < perplexity(views["none"]) < 20
    assert math.isclose(int8.perplexity_ratio, 1, abs_tol=0.01)
    assert math.isclose(int4.perplexity_ratio, 1, abs_tol=0.06)
    assert int8.top1_share > 0.93
    assert int4.top1_share > 0.85
