"""Whole engines whose forward pass is a device's, mostly with a CPU in the device's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.graph_sizes import graph_sizes
from remora.configs.planning.loading import PLAIN_LOADING
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.attention.windowed import WindowedAttention
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.engine import Engine
from remora.engine.graphs.cuda_graphs import GraphRunner
from remora.engine.graphs.device_forward import DeviceForward, PassOutput, StepLimits
from remora.engine.graphs.device_sampler import DeviceTokenSampler
from remora.engine.graphs.device_stream import stream_of
from remora.engine.kv.pages import pages_needed
from remora.engine.models.captures import Captures
from remora.engine.models.decoder import DecoderModel
from remora.engine.offload.blocks import offload_as_planned
from remora.engine.protocols import AttentionBackend
from remora.engine.runner.device import capture
from remora.engine.runner.device import make_attention as device_attention
from remora.engine.runner.eager import EagerForward
from remora.engine.runner.inputs import InputBatch
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.sampler import Sampler
from remora.engine.spec.draft_chain import DeviceChain
from remora.engine.spec.draft_model import DraftModel
from remora.engine.spec.drafter import Drafter, PendingProposer
from remora.engine.spec.heads.build import device_pass, head_plan, target_states
from remora.engine.spec.heads.config import DraftHeadConfig
from remora.engine.spec.heads.drafter import HeadDrafter
from remora.engine.spec.heads.ends import target_ends
from remora.engine.spec.heads.head import open_head
from remora.engine.spec.heads.torch_pass import HeadModel
from remora.engine.spec.speculation import Speculation
from remora.engine.spec.stop_tokens import StopTokens
from remora.engine.types import EngineStats, SamplingParams, SequenceOutput
from tests.engine.fakes import make_plan, make_request
from tests.engine.loaded import load_f32
from tests.engine.spec.proposers import FixedController, Guess, GuessingProposer

T = TypeVar("T")
CPU = torch.device("cpu")
MAX_DRAFTS = 4
Requests = Mapping[str, tuple[list[int], SamplingParams]]
Given = Mapping[str, tuple[list[int] | PromptEmbeddings, SamplingParams]]


class Rerun:
    """A GraphRunner without graphs: a replay calls the captured function again."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        self.num_captured += 1
        places = _places(run())

        def replay() -> T:
            self.num_replayed += 1
            again = run()
            assert _places(again) == places
            return again

        return replay

    def close(self) -> None:
        pass


def _places(made: object) -> list[int]:
    """Return the addresses of what a captured step made."""
    if isinstance(made, PassOutput):
        return [made.hidden.data_ptr(), made.logits.data_ptr()]
    assert isinstance(made, torch.Tensor)
    return [made.data_ptr()]


@dataclass(slots=True)
class Run:
    """What requests came to, each as outputs in order."""

    outputs: dict[tuple[str, int], list[SequenceOutput]] = field(default_factory=dict)
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_right: int = 0

    def take_stats(self, stats: EngineStats) -> None:
        self.num_preemptions, self.num_steps = stats.preemptions_total, stats.steps_total
        self.num_drafts, self.num_right = stats.draft_tokens_total, stats.accepted_drafts_total

    def token_ids(self) -> dict[tuple[str, int], list[int]]:
        return {
            key: [token for output in outputs for token in output.token_ids]
            for key, outputs in self.outputs.items()
        }

    def ends(self) -> dict[tuple[str, int], object]:
        return {key: outputs[-1].finish_reason for key, outputs in self.outputs.items()}

    def hidden_states(self) -> dict[tuple[str, int], Any]:
        return {key: outputs[-1].hidden_states for key, outputs in self.outputs.items()}

    def logprobs(self) -> dict[tuple[str, int], list[float]]:
        return {
            key: [
                value
                for output in outputs
                for part in (*output.prompt_logprobs, output.logprobs)
                if part is not None
                for value in part.logprobs.tolist()
            ]
            for key, outputs in self.outputs.items()
        }


def all_sizes(rows: int) -> DevicePlan:
    return DevicePlan(graph_sizes=graph_sizes(most=rows))


def run(
    path: Path,
    requests: Given,
    *,
    forward: str = "device",
    overlap: bool = False,
    graph_runner: GraphRunner | None = None,
    device: torch.device = CPU,
    make_attention: Callable[..., AttentionBackend] = TorchAttention,
    adapt: Callable[[DecoderModel], Any] = lambda model: None,
    adapters: Mapping[str, int] | None = None,
    aborts: Mapping[int, str] | None = None,
    room: LoRASlotConfig | None = None,
    how: DevicePlan | None = None,
    held: str = "dequantised",
    guess: Guess | None = None,
    draft: Path | None = None,
    head: DraftHeadConfig | None = None,
    watch: Callable[[Engine], object] = lambda engine: None,
    amid: AbstractContextManager[object] | None = None,
    **plan_changes: Any,
) -> Run:
    """Let an engine run requests: on torch's operations one by one, or as a device does.

    adapt:    makes room for adapters in a loaded model, the plan's `room`; returns what fills slots
    aborts:   step -> request that ends before it
    how:      graphs to capture and when to replay them; by default all sizes, always
    held:     how layers hold weights, as of `load_model`
    guess:    drafts MAX_DRAFTS tokens for each row
    draft:    model that does
    head:     head that does
    watch:    called with the engine before it runs
    amid:     what the steps run in, once all is made
    """
    values = {"page_size": 4, "num_pages": 64, "max_model_len": 128, **plan_changes}
    plan = make_plan(adapters=room, **values)
    plan = replace(plan, on_device=how or all_sizes(plan.max_running_requests))
    torch.set_num_threads(1)
    model = load_f32(path, device=str(device), held=held)
    offload_as_planned(model, plan)
    pool = adapt(model)
    if head is not None and head.captures:
        model.captures = Captures(
            head.captures,
            max_tokens=plan.max_step_tokens,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            device=device,
        )
    rows = plan.max_running_requests
    table = InputBatch(
        max_rows=rows,
        max_tokens=plan.max_sequence_tokens,
        page_size=plan.page_size,
        windowed=plan.windows is not None,
    )
    sampler = Sampler(max_rows=rows, vocab_size=model.vocab_size, eos_token_ids=())
    speculation = make_speculation(guess, draft or head, model.vocab_size)
    make = partial(make_device_forward, plan, device, make_attention, graph_runner)
    if forward == "eager":
        attention = _attention_of(model, plan, device, make_attention)
        eager = EagerForward(model, attention, page_size=plan.page_size)
        runner = LocalRunner(eager, sampler, table, adapters=pool)
    else:
        most = 0 if speculation is None else MAX_DRAFTS
        by_itself = make(model, most)
        if forward == "device":
            lines, step = rows * (1 + most), by_itself.sampling
            sampler.token_sampler = DeviceTokenSampler(stream_of(device), lines, step)
        drafter: Drafter | None
        if head is None:
            drafter = make_drafter(draft, make, plan, sampler, table, model.vocab_size, device)
        else:
            drafter = make_head_drafter(head, model, by_itself, plan, sampler, table, graph_runner)
        tokens = by_itself if overlap or speculation is None else None
        runner = LocalRunner(
            by_itself, sampler, table, adapters=pool, device_tokens=tokens, drafter=drafter
        )
    engine = make_engine(plan, runner, model.vocab_size, overlap, speculation)
    watch(engine)
    with amid or nullcontext():
        made = _answers(engine, requests, adapters or {}, aborts or {})
    engine.close()
    return made


def make_engine(
    plan: EnginePlan,
    runner: LocalRunner,
    vocab_size: int,
    overlap: bool,
    speculation: Speculation | None,
) -> Engine:
    return Engine(
        plan,
        runner,
        eos_token_ids=(),
        vocab_size=vocab_size,
        overlap=overlap,
        speculation=speculation,
    )


def make_device_forward(
    plan: EnginePlan,
    device: torch.device,
    make_attention: Callable[..., AttentionBackend],
    graph_runner: GraphRunner | None,
    model: DecoderModel,
    max_drafts: int = 0,
) -> DeviceForward:
    limits = StepLimits(
        max_rows=plan.max_running_requests,
        max_tokens=plan.max_step_tokens,
        max_pages=pages_needed(plan.max_sequence_tokens, plan.page_size),
        windowed=plan.windows is not None,
        max_drafts=max_drafts,
    )
    attention = _attention_of(model, plan, device, make_attention)
    forward = DeviceForward(model, attention, limits, stream_of(device))
    if graph_runner is not None:
        capture(forward, plan, graph_runner, show_progress=False)
    return forward


def make_drafter(
    draft: Path | None,
    make: Callable[[DecoderModel], DeviceForward],
    plan: EnginePlan,
    sampler: Sampler,
    table: InputBatch,
    vocab_size: int,
    device: torch.device = CPU,
) -> DraftModel | None:
    """Load a draft model; `make` makes its forward pass."""
    if draft is None:
        return None
    own = load_f32(draft, device=str(device))
    forward, stream = make(own), stream_of(device)
    return DraftModel(
        forward,
        DeviceTokenSampler(stream, plan.max_running_requests, forward.sampling),
        DeviceChain(StopTokens((), vocab_size), forward, stream, most_id=own.vocab_size - 1),
        sampler,
        table,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_tokens=plan.max_step_tokens,
        draft_vocab_size=own.vocab_size,
        vocab_size=vocab_size,
    )


def make_head_drafter(
    config: DraftHeadConfig,
    model: DecoderModel,
    target: DeviceForward,
    plan: EnginePlan,
    sampler: Sampler,
    table: InputBatch,
    graph_runner: GraphRunner | None,
) -> HeadDrafter:
    """Load a head for a model whose forward pass is `target`; its drafts stay on the device."""
    size, device = model.vocab_size, model.embedding.weight.device
    with open_head(
        config, PLAIN_LOADING, dtype=model.dtype, vocab_size=size, device=str(device)
    ) as (head, fill):
        fill(None)
    own = head_plan(plan)
    if graph_runner is None:
        own = replace(own, on_device=replace(own.on_device, graph_sizes=()))
    over = HeadModel(head, target_ends(model, plan), max_tokens=plan.max_step_tokens)
    passes, forward = device_pass(over, head.decoder, own, lambda: graph_runner or Rerun())
    chain = DeviceChain(StopTokens((), size), forward, stream_of(device), most_id=size - 1)
    return HeadDrafter(
        passes,
        chain,
        sampler,
        table,
        states=target_states(target, model, config),
        max_tokens=plan.max_step_tokens,
    )


def make_speculation(
    guess: Guess | None, draft: object | None, vocab_size: int
) -> Speculation | None:
    if guess is None and draft is None:
        return None
    return Speculation(
        PendingProposer() if guess is None else GuessingProposer(guess),
        FixedController(MAX_DRAFTS),
        max_drafts=MAX_DRAFTS,
        vocab_size=vocab_size,
        eos_token_ids=(),
        source="guess",
    )


def _attention_of(
    model: DecoderModel,
    plan: EnginePlan,
    device: torch.device,
    make_attention: Callable[..., AttentionBackend],
) -> AttentionBackend:
    """Return the attention of all layers, some of which may have pages of their own."""

    def attend_with(num_layers: int, num_pages: int) -> AttentionBackend:
        return make_attention(
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=plan.page_size,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=torch.float32,
            device=str(device),
        )

    windows = plan.windows
    if model.config.attention.latent is not None:
        return device_attention(model, plan, plan.num_pages)
    if windows is None:
        return attend_with(len(model.layers), plan.num_pages)
    return WindowedAttention(
        windows.layers,
        lambda apart: attend_with(
            windows.layers.count(apart), windows.num_pages if apart else plan.num_pages
        ),
    )


def _answers(
    engine: Engine,
    requests: Given,
    adapters: Mapping[str, int],
    aborts: Mapping[int, str],
) -> Run:
    made = Run()
    for name, (prompt, params) in requests.items():
        adapter = adapters.get(name, 0)
        engine.add(make_request(name, prompt, params, lora_id=adapter))
        made.outputs |= {(name, index): [] for index in range(params.n)}
    step = 0
    while engine.has_work:
        outputs = engine.abort(aborts[step]) if step in aborts else []
        for output in (*outputs, *engine.step()):
            made.outputs[output.request_id, output.index].append(output)
        engine.check_integrity()
        step += 1
    made.take_stats(engine.stats())
    return made
