"""llama.cpp's rates, from its own tools: llama-bench and llama-batched-bench.

They compute random tokens and sample nothing, so the figures are a little better than an API's.
llama.cpp has no offline call that shares a part of the prompts: `shared-prefix` adds up two runs,
the common part computed once with all the answers, and the 64 own parts. That leaves out what
those parts would attend to, and so errs in llama.cpp's favour.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remora.deployments.bench.workloads import Workload
from tests.benchmarks.peers.peers import KV_TOKENS, PeerError, llama_tool

Figures = dict[str, float]


class Crash(PeerError):
    """One of llama.cpp's tools was ended by a signal."""


def measure_all(
    model: Path, workloads: Sequence[Workload], *, threads: int, samples: int
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Return workload -> figures, and workload -> how a tool crashed. Raises other PeerErrors."""
    figures: dict[str, Figures] = {}
    crashes: dict[str, str] = {}
    for workload in workloads:
        try:
            figures[workload.name] = measure(model, workload, threads=threads, samples=samples)
        except Crash as crash:
            crashes[workload.name] = str(crash)
    return figures, crashes


def measure(model: Path, workload: Workload, *, threads: int, samples: int) -> Figures:
    """Return the figures of one workload, medians of the samples. Raises PeerError."""
    single = ["--model", str(model), "--threads", str(threads), "--output", "json"]
    single += ["--repetitions", str(samples), "--flash-attn", "1"]
    if workload.name == "decode":
        sizes = ["-p", "0", "-n", str(workload.output_tokens), "-d", str(workload.input_tokens)]
        [result] = json.loads(_output("llama-bench", [*single, *sizes]))
        return {"decode_tok_s": statistics.median(result["samples_ts"])}
    if workload.name == "prefill":
        sizes = ["-p", str(workload.input_tokens), "-n", "0"]
        [result] = json.loads(_output("llama-bench", [*single, *sizes]))
        return {"prefill_tok_s": statistics.median(result["samples_ts"])}
    seconds = statistics.median(_batch_s(model, workload, threads) for _ in range(samples))
    output = workload.num_requests * workload.output_tokens
    total = output + workload.num_requests * workload.input_tokens
    return {"output_tok_s": output / seconds, "total_tok_s": total / seconds}


def _batch_s(model: Path, workload: Workload, threads: int) -> float:
    """Seconds of one sample of many requests at once."""
    count, shared = workload.num_requests, workload.shared_tokens
    if not shared:
        run = _batched(model, threads, count, workload.input_tokens, workload.output_tokens)
        return float(run["t"])
    answers = _batched(model, threads, count, shared, workload.output_tokens, "-pps")
    own = _batched(model, threads, count, workload.input_tokens - shared, 1)
    return float(answers["t"] + own["t_pp"])


def _batched(
    model: Path, threads: int, count: int, prompt: int, output: int, *more: str
) -> dict[str, Any]:
    arguments = ["--model", str(model), "--threads", str(threads), "--ctx-size", str(KV_TOKENS)]
    arguments += ["-npp", str(prompt), "-ntg", str(output), "-npl", str(count), *more]
    arguments += ["--output-format", "jsonl", "--batch-size", "2048", "--flash-attn", "on"]
    lines = _output("llama-batched-bench", arguments).splitlines()
    found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return found


def _output(tool: str, arguments: Sequence[str]) -> str:
    done = subprocess.run(
        [str(llama_tool(tool)), *arguments], stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )
    if done.returncode < 0:
        raise Crash(f"{tool} crashed: {signal.Signals(-done.returncode).name}")
    if done.returncode != 0:
        raise PeerError(f"{tool} ended with {done.returncode}; its reason is above")
    return done.stdout
