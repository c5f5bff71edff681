"""How many sequences fit when layers with a sliding window have pages of their own.

    python -m tests.benchmarks.window_pages

Plans for models of the shape of Gemma 3 4B (five layers with a window of 1024 for each without) and
Mistral 7B v0.1 (4096 in every layer) on a GPU with 24 GB; nothing is loaded or run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.load import parse_args
from remora.configs.planning.memory_report import report
from remora.configs.planning.plan import make_plan

LENGTHS = (512, 2048, 8192, 32_768)
GEMMA = ModelFacts(
    architecture="Gemma3ForCausalLM",
    num_layers=34,
    hidden_size=2560,
    intermediate_size=10_240,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    vocab_size=262_208,
    max_position=131_072,
    dtype="bfloat16",
    num_parameters=3_880_000_000,
    tied_embeddings=True,
    windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(34)),
)
MISTRAL = ModelFacts(
    architecture="MistralForCausalLM",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32_000,
    max_position=32_768,
    dtype="bfloat16",
    num_parameters=7_240_000_000,
    windows=(4096,) * 32,
)
GPU = MachineFacts(
    num_cores=8,
    total_bytes=24 * 10**9,
    available_bytes=23 * 10**9,
    cpu_name="any",
    cpu_features=(),
    devices=("cuda:0", "cpu"),
    has_triton=True,
)
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("together (window_pages off)", {"window_pages": "off"}),
    ("apart, as without a word", {}),
    ("apart, window_ratio 0.8", {"window_ratio": 0.8}),
    ("apart, window_ratio 0.2", {"window_ratio": 0.2}),
)


def sequences(model: ModelFacts, engine: dict[str, Any]) -> list[int]:
    """Return how many sequences of each length fit at a time."""
    keys = {"device": "cuda", "max_running_requests": 4096, "max_step_tokens": 4096} | engine
    config = parse_args({"model": {"path": "x"}, "engine": keys})
    plan = make_plan(config, model, GPU, Path("x"))
    fitting = dict(report(plan, model, is_native=False).concurrency)
    return [fitting[length] for length in LENGTHS if length in fitting]


def main() -> None:
    """Print a table for each model."""
    for name, model in (("Gemma 3 4B", GEMMA), ("Mistral 7B v0.1", MISTRAL)):
        print(f"| {name}: sequences of | " + " | ".join(f"{n:,}" for n in LENGTHS) + " |")
        print("|---|" + "---:|" * len(LENGTHS))
        for label, engine in WAYS:
            found = " | ".join(f"{number:,}" for number in sequences(model, engine))
            print(f"| {label} | {found} |")
        print()


if __name__ == "__main__":
    main()
