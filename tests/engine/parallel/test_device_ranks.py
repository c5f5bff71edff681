"""Ranks whose forward pass is a device's, with CPUs in the devices' place and gloo in nccl's.

Whole engines: rank 0 schedules and samples, the others follow it through their channels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remora.configs.planning.device_plan import HeldWeights
from remora.configs.planning.plan import EnginePlan
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.engine import Engine
from remora.engine.graphs.device_forward import DeviceForward, StepLimits
from remora.engine.graphs.device_sampler import DeviceTokenSampler
from remora.engine.graphs.device_stream import stream_of
from remora.engine.kv.pages import pages_needed
from remora.engine.launch import make_table
from remora.engine.offload.blocks import offload_as_planned
from remora.engine.parallel.channel import Address, Channel, Listener
from remora.engine.parallel.follower import Follower
from remora.engine.parallel.followers import ChannelFollowers
from remora.engine.parallel.group import Group
from remora.engine.parallel.micro_batches import split_batch, split_inputs
from remora.engine.parallel.rank_model import RankModel
from remora.engine.parallel.shared_tokens import SharedTokens
from remora.engine.runner.device import capture
from remora.engine.runner.eager import make_batch
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.sampler import Sampler
from remora.engine.types import Request, SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.attention.test_libraries import make_step
from tests.engine.fakes import make_plan
from tests.engine.graphs.device_runs import (
    MAX_DRAFTS,
    Requests,
    Rerun,
    Run,
    all_sizes,
    make_device_forward,
    make_drafter,
    make_engine,
    make_speculation,
)
from tests.engine.graphs.device_runs import run as run_alone
from tests.engine.loaded import load_f32
from tests.engine.offload.plans import offloaded
from tests.engine.parallel.ranks import connected
from tests.engine.spec.proposers import Guess, replaying
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import SAMPLES, small

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_model_len": 128}


def make_requests(lengths: Sequence[int], **changes: Any) -> Requests:
    values: dict[str, Any] = {"max_tokens": 7, "temperature": 0.0, "ignore_eos": True} | changes
    generator = np.random.default_rng(1)
    return {
        f"r{number}": (generator.integers(10, 250, length).tolist(), SamplingParams(**values))
        for number, length in enumerate(lengths)
    }


def make_forward(path: Path, plan: EnginePlan, group: Group) -> tuple[DeviceForward, Rerun]:
    """Make a rank's forward pass, and capture its decode steps."""
    model = load_f32(path, layout=group.layout, held=plan.on_device.held_weights)
    offload_as_planned(model, plan)
    attention = TorchAttention(
        num_layers=len(model.layers),
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        num_kv_heads=len(group.layout.kv_heads(model.config.num_kv_heads)),
        head_dim=model.config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    limits = StepLimits(
        max_rows=plan.max_running_requests,
        max_tokens=plan.max_step_tokens,
        max_pages=pages_needed(plan.max_sequence_tokens, plan.page_size),
        max_drafts=MAX_DRAFTS,
    )
    ranks = RankModel(model, group, micro_batches=plan.micro_batches)
    forward, graph_runner = DeviceForward(ranks, attention, limits, stream_of(CPU)), Rerun()
    capture(forward, plan, graph_runner, show_progress=False)
    return forward, graph_runner


@contextmanager
def device_ranks(
    path: Path,
    plan: EnginePlan,
    *,
    overlap: bool,
    guess: Guess | None = None,
    draft: Path | None = None,
) -> Iterator[tuple[Engine, list[Rerun]]]:
    """Make an engine of the plan's ranks, each follower in a thread.

    guess, draft:  as of `device_runs.run`; the draft model runs on rank 0
    """
    with connected(plan.tp_size, plan.pp_size) as (threads, groups):
        made = threads.on_all(lambda rank: make_forward(path, plan, groups[rank]))
        shared = [
            SharedTokens(forward, group, CPU) if overlap else None
            for (forward, _), group in zip(made, groups, strict=True)
        ]

        def follow(address: Address, rank: int) -> None:
            channel = Channel.connect(address, rank, 10.0)
            forward, tokens = made[rank][0], shared[rank]
            table = make_table(plan)
            Follower(forward, table, channel, groups[rank], shared_tokens=tokens).run()

        with closing(Listener()) as listener:
            running = [
                threading.Thread(target=follow, args=(listener.address, rank))
                for rank in range(1, plan.num_ranks)
            ]
            for thread in running:
                thread.start()
            followers = ChannelFollowers(listener.accept(plan.num_ranks, 10.0))
        model = load_f32(path)
        sampler = Sampler(
            max_rows=plan.max_running_requests,
            vocab_size=model.vocab_size,
            eos_token_ids=(),
            token_sampler=DeviceTokenSampler(
                stream_of(CPU),
                plan.max_running_requests * (1 + MAX_DRAFTS),
                made[0][0].sampling,
            ),
        )
        table = make_table(plan)
        make = partial(make_device_forward, plan, CPU, TorchAttention, Rerun())
        drafter = make_drafter(draft, make, plan, sampler, table, model.vocab_size)
        runner = LocalRunner(
            made[0][0],
            sampler,
            table,
            followers,
            groups[0],
            device_tokens=shared[0],
            drafter=drafter,
        )
        speculation = make_speculation(guess, draft, model.vocab_size)
        engine = make_engine(plan, runner, model.vocab_size, overlap, speculation)
        try:
            yield engine, [graph_runner for _, graph_runner in made]
        finally:
            engine.close()
            for thread in running:
                thread.join(10)


def run_ranks(
    path: Path,
    requests: Requests,
    *,
    overlap: bool = True,
    late: Sequence[str] = (),
    aborts: Sequence[str] = (),
    held: HeldWeights = "dequantised",
    guess: Guess | None = None,
    draft: Path | None = None,
    **changes: Any,
) -> tuple[Run, list[Rerun]]:
    """Run requests on several ranks; `late` ones arrive when the others have ended."""
    how = replace(all_sizes(4), held_weights=held)
    plan = make_plan(**(OPTIONS | changes), on_device=how)
    found = Run()
    made = device_ranks(path, plan, overlap=overlap, guess=guess, draft=draft)
    with made as (engine, graph_runners):

        def add(name: str) -> None:
            prompt, sampling = requests[name]
            engine.add(Request(request_id=name, prompt_ids=prompt, sampling=sampling))

        for name in requests:
            if name not in late:
                add(name)
            found.outputs[name, 0] = []
        waiting, step = list(late), 0
        while engine.has_work or waiting:
            if not engine.has_work:
                add(waiting.pop(0))
            step += 1
            if step == 4:
                for name in aborts:
                    engine.abort(name)
            for output in engine.step():
                found.outputs[output.request_id, output.index].append(output)
        found.take_stats(engine.stats())
    return found, graph_runners


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_generate_the_tokens_of_one(
    tp_size: int, pp_size: int, overlap: bool, tiny_checkpoints: TinyCheckpoints
) -> None:
    """More requests than rows, in chunks beside rows that decode, from graphs and one by one."""
    path = tiny_checkpoints("llama", num_hidden_layers=2, num_attention_heads=4)
    requests = make_requests([1, 9, 30, 3, 17])
    ranks: dict[str, Any] = {
        "tp_size": tp_size,
        "pp_size": pp_size,
        "micro_batches": pp_size,
    }

    got, graph_runners = run_ranks(path, requests, overlap=overlap, **ranks)

    expected = run_alone(path, requests, forward="eager", **OPTIONS)
    assert got.token_ids() == expected.token_ids()
    assert graph_runners[0].num_replayed > 0
    assert len({runner.num_replayed for runner in graph_runners}) == 1


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_ranks_fetch_weights_from_host_memory(
    tp_size: int, pp_size: int, tiny_checkpoints: TinyCheckpoints
) -> None:
    """Each rank its own part of them, in every micro-batch."""
    path = tiny_checkpoints("llama", num_hidden_layers=4, num_attention_heads=4)
    requests = make_requests([1, 9, 30])
    ranks: dict[str, Any] = {"tp_size": tp_size, "pp_size": pp_size, "micro_batches": pp_size}

    got, _ = run_ranks(path, requests, offload=offloaded(0, 1, 2, 3), **ranks)

    expected = run_alone(path, requests, forward="eager", **OPTIONS)
    assert got.token_ids() == expected.token_ids()


@pytest.mark.parametrize("source", ["text", "model"])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_ranks_verify_drafts(
    tp_size: int, pp_size: int, source: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama", num_hidden_layers=2, num_attention_heads=4)
    requests = make_requests([1, 9, 30, 3, 17])
    expected = run_alone(path, requests, forward="eager", **OPTIONS)
    texts = [
        [*requests[name][0], *token_ids] for (name, _), token_ids in expected.token_ids().items()
    ]
    drafts: dict[str, Any] = (
        {"draft": path} if source == "model" else {"guess": replaying(texts, every=4)}
    )

    got, _ = run_ranks(path, requests, overlap=False, tp_size=tp_size, pp_size=pp_size, **drafts)

    assert got.token_ids() == expected.token_ids()
    assert got.num_steps < expected.num_steps
    assert (got.num_right == got.num_drafts) == (source == "model")


@pytest.mark.parametrize("name", ["awq", "ct-int8", "fp8-tensor"])
def test_ranks_hold_quantised_weights(
    name: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Rows are quantised on each rank by its own part of them, which changes no token here."""
    path = tiny_checkpoints("llama", num_hidden_layers=1, num_attention_heads=4)
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    torch.manual_seed(0)
    quantised, _ = quantise(path, tmp_path, small(SAMPLES[name]), linears)
    requests = make_requests([1, 9, 30])

    got, _ = run_ranks(quantised, requests, tp_size=2, held="stored")

    expected = run_alone(quantised, requests, forward="eager", held="stored", **OPTIONS)
    assert got.token_ids() == expected.token_ids()


def test_rows_that_are_preempted(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama", num_hidden_layers=1, num_attention_heads=4)
    requests = make_requests([7, 4, 8, 6], max_tokens=9, ignore_eos=False, seed=11)
    scarce: dict[str, Any] = {"num_pages": 9, "conservativeness": 0.02, "max_model_len": 32}

    got, _ = run_ranks(path, requests, tp_size=2, **scarce)

    assert got.num_preemptions > 0
    assert got.token_ids() == run_alone(path, requests, forward="eager", **OPTIONS).token_ids()


def test_rows_that_are_aborted_and_late(tiny_checkpoints: TinyCheckpoints) -> None:
    """Late requests start when the pipeline has emptied: two steps have ended since the last."""
    path = tiny_checkpoints("llama", num_hidden_layers=1, num_attention_heads=4)
    requests = make_requests([7, 4, 8, 6, 4])

    got, _ = run_ranks(path, requests, tp_size=2, late=["r3", "r4"], aborts=["r1"])

    expected = run_alone(path, requests, forward="eager", **OPTIONS).token_ids()
    assert len(got.token_ids()["r1", 0]) < len(expected["r1", 0])
    for name in ("r0", "r2", "r3", "r4"):
        assert got.token_ids()[name, 0] == expected[name, 0]


def test_prompt_logprobs_are_gathered_from_all_ranks(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama", num_hidden_layers=1, num_attention_heads=4)
    requests = make_requests([6, 11], logprobs=3, prompt_logprobs=2)

    got, _ = run_ranks(path, requests, tp_size=2)

    expected = run_alone(path, requests, forward="eager", **OPTIONS).logprobs()
    for key, values in expected.items():
        assert got.logprobs()[key] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [([5, 9, 3], [1, 1, 1]), ([5, 9, 12, 20], [1, 1, 7, 20]), ([30, 4], [17, 2])],
)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 50])
def test_a_batch_is_split_as_its_step_is(
    lengths: list[int], counts: list[int], num_parts: int
) -> None:
    step = make_step(lengths, counts, 4)

    parts = split_batch(make_batch(step, page_size=4, device=CPU), num_parts)

    expected = split_inputs(step, num_parts)
    assert len(parts) == len(expected)
    for part, inputs in zip(parts, expected, strict=True):
        same = make_batch(inputs, page_size=4, device=CPU)
        for name in ("token_ids", "positions", "slots", "starts", "lengths"):
            assert tensor_of(part, name).tolist() == tensor_of(same, name).tolist()
        width = same.tables.shape[1]
        assert part.tables[:, :width].tolist() == same.tables.tolist()
        assert (part.num_decodes, part.extend_lens) == (same.num_decodes, same.extend_lens)
        assert part.extend_starts == same.extend_starts


def tensor_of(batch: Any, name: str) -> Tensor:
    found: Tensor = getattr(batch, name)
    return found
