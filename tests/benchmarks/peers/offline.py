"""A peer's rates through its own offline API, with the prompts that `remora bench` has.

Each peer runs in its own Python, in a `drive_*.py`; this file only says what to run and turns
seconds into rates.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from remora.deployments.bench.machine import peak_memory
from remora.deployments.bench.workloads import Workload, token_prompts
from tests.benchmarks.peers import llama_bench
from tests.benchmarks.peers.groups import stop_group
from tests.benchmarks.peers.peers import HERE, LLAMA, VLLM, Peer, PeerError, environment

Figures = dict[str, float]
MEMORY_EVERY_S = 1.0

console = Console(stderr=True)


def measure(
    peer: Peer,
    model: Path,
    workloads: Sequence[Workload],
    *,
    threads: int,
    samples: int,
    seed: int,
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Return workload -> figures, each the median of `samples`, after one that does not count.

    The second result is workload -> crash, for workloads during which llama.cpp crashed.
    Raises PeerError.
    """
    if peer is LLAMA:
        return llama_bench.measure_all(model, workloads, threads=threads, samples=samples)
    runs = [
        run
        for workload in workloads
        for number in range(samples + 1)
        for run in sample_runs(workload, seed + number)
    ]
    job = {"model": str(model), "threads": threads, "options": peer.options, "runs": runs}
    seconds = iter(_drive(peer, job, threads)["seconds"])
    return {workload.name: _median(workload, seconds, samples) for workload in workloads}, {}


def sample_runs(workload: Workload, seed: int) -> list[dict[str, Any]]:
    """Return the runs of one sample: prompts to answer at once, and how long.

    For the rate of decoding, a run of one token goes first, with prompts of its own so that no
    prefix cache knows those of the second.
    """
    lengths = [1, workload.output_tokens] if _is_decode(workload) else [workload.output_tokens]
    return [
        {"prompts": token_prompts(workload, seed=1000 * seed + number), "max_tokens": max_tokens}
        for number, max_tokens in enumerate(lengths)
    ]


def figures_of(workload: Workload, seconds: Sequence[float]) -> Figures:
    """Turn the seconds of one sample's runs into rates."""
    if _is_decode(workload):
        first, whole = seconds
        return {"decode_tok_s": (workload.output_tokens - 1) / (whole - first)}
    if workload.num_requests == 1:
        return {"prefill_tok_s": workload.input_tokens / seconds[0]}
    output = workload.num_requests * workload.output_tokens
    total = output + workload.num_requests * workload.input_tokens
    return {"output_tok_s": output / seconds[0], "total_tok_s": total / seconds[0]}


def _is_decode(workload: Workload) -> bool:
    return workload.num_requests == 1 and workload.output_tokens > 1


def _median(workload: Workload, seconds: Iterator[float], samples: int) -> Figures:
    length = 2 if _is_decode(workload) else 1
    found = [
        figures_of(workload, [next(seconds) for _ in range(length)]) for _ in range(samples + 1)
    ][1:]
    return {key: statistics.median(sample[key] for sample in found) for key in found[0]}


def _drive(peer: Peer, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run a job in the peer's own Python; its log goes to standard error. Raises PeerError."""
    driver = HERE / ("drive_vllm.py" if peer is VLLM else "drive_transformers.py")
    process = subprocess.Popen(
        [str(peer.python), str(driver)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        env=environment(peer, threads),
        text=True,
        start_new_session=True,
    )
    try:
        answer, largest_bytes = _converse(process, json.dumps(job))
    finally:
        stop_group(process)
    if process.returncode != 0:
        raise PeerError(f"{driver.name} ended with {process.returncode}; its reason is above")
    found: dict[str, Any] = json.loads(answer)
    console.print(
        f"{peer.name}: loaded in {found['load_s']:.1f} s, {largest_bytes / 2**30:.1f} GiB"
    )
    return found


def _converse(process: subprocess.Popen[str], job: str) -> tuple[str, int]:
    """Hand over the job; return the answer and the peak bytes of all processes meanwhile."""
    request: str | None = job
    largest_bytes = 0
    while True:
        try:
            answer, _ = process.communicate(request, timeout=MEMORY_EVERY_S)
        except subprocess.TimeoutExpired:
            request = None
            memory = peak_memory(process.pid)
            largest_bytes = max(largest_bytes, memory.sum_bytes if memory else 0)
        else:
            return answer, largest_bytes
