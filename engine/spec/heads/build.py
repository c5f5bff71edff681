"""Reads and builds the draft head of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.planning.draft_plan import HeadFacts
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.engine.graphs.cuda_graphs import CudaGraphRunner, GraphRunner
from remora.engine.graphs.device_forward import DeviceForward
from remora.engine.graphs.device_stream import stream_of
from remora.engine.graphs.step_builder import StepShape
from remora.engine.graphs.step_program import StepProgram
from remora.engine.graphs.step_weights import WeightFormats
from remora.engine.models.checkpoint import read_config, read_raw_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.locate import locate_draft, locate_model
from remora.engine.protocols import ForwardPass
from remora.engine.runner import device
from remora.engine.runner.eager import EagerForward
from remora.engine.runner.forward import DTYPES
from remora.engine.runner.inputs import Int64Array
from remora.engine.sampling.token_sampler import HostTokenSampler
from remora.engine.spec.draft_chain import DeviceChain, DraftChain, HostChain
from remora.engine.spec.heads.config import DraftHeadConfig, read_eagle, read_mtp
from remora.engine.spec.heads.drafter import HeadDrafter
from remora.engine.spec.heads.ends import target_ends
from remora.engine.spec.heads.head import DraftHead, open_head, open_stored_head
from remora.engine.spec.heads.native_pass import NativePass
from remora.engine.spec.heads.passes import HeadPass, States
from remora.engine.spec.heads.program import HeadProgramBuilder
from remora.engine.spec.heads.torch_pass import HeadModel, TorchPass
from remora.engine.spec.stop_tokens import StopTokens
from remora.engine.spec.target import Target
from remora.kernels import sampling as sampling_kernels
from remora.kernels.cpu.library import Format, Team
from remora.kernels.memory import to_device


def read_head_config(config: ServeConfig) -> DraftHeadConfig:
    """Read the config of the configured draft head. Raises ConfigError."""
    path = locate_model(config.model)
    overrides = config.model.config_overrides
    target = read_config(path, overrides)
    if config.speculation.method == "mtp":
        return read_mtp(path, target, read_raw_config(path, overrides))
    own = locate_draft(config)
    assert own is not None, "the section demands it"
    shapes = open_stored_head(own, Loading.of(config.model)).shapes()
    return read_eagle(own, target, shapes)


def head_facts(head: DraftHeadConfig, model: ModelFacts, dtype: str, num_ranks: int) -> HeadFacts:
    """Return the facts that a plan needs.

    model:  the target
    dtype:  in which the target computes
    """
    decoder, kind = head.decoder, DTYPES[dtype]
    num_bytes = DraftHead(head, dtype=kind, device="meta").num_bytes
    if num_ranks > 1:  # ranks hold parts of the embedding and of the output head
        num_ends = 1 if head.own_head or model.tied_embeddings else 2
        num_bytes += num_ends * model.vocab_size * model.hidden_size * kind.itemsize
    # What the target keeps and the head has not read yet, and the head's own.
    captured = len({*head.captures}) * model.hidden_size
    state_size = captured + head.state_size + decoder.hidden_size
    return HeadFacts(
        path=head.path,
        weight_bytes=num_bytes,
        token_bytes=2 * decoder.num_kv_heads * decoder.head_dim * kind.itemsize,
        state_bytes=state_size * kind.itemsize,
        captures=head.captures,
        max_position=decoder.max_position,
    )


def build_head_drafter(target: Target) -> HeadDrafter:
    """Load the configured draft head. Raises ConfigError."""
    config, built = target.config, target.built
    head_config = read_head_config(config)
    stops = StopTokens(target.tokenizer.eos_token_ids, target.vocab_size)
    if isinstance(built.forward, StepProgram) and built.team is not None:
        forward = built.forward
        read = forward.captured if head_config.captures else forward.final
        states = _of_host(read)
        passes: HeadPass = _native_pass(target, head_config, forward, built.team)
        chain: DraftChain = HostChain(stops)
    elif built.model is not None:
        passes, chain = _torch_pass(target, head_config, built.model, stops)
        states = target_states(built.forward, built.model, head_config)
    else:
        raise ConfigError(
            f"speculation.method = {config.speculation.method} needs a model that remora "
            f"implements, and this one runs with {built.description}; speculation.method ngram "
            "works there"
        )
    return HeadDrafter(
        passes,
        chain,
        target.sampler,
        target.table,
        states=states,
        max_tokens=target.plan.max_step_tokens,
    )


def _of_host(read: Callable[[Tensor], Tensor]) -> States:
    return lambda tokens: read(torch.from_numpy(tokens))


def _native_pass(
    target: Target, config: DraftHeadConfig, forward: StepProgram, team: Team
) -> NativePass:
    plan = target.plan
    dtype = DTYPES[plan.dtype]
    shape = StepShape(
        max_tokens=plan.max_step_tokens,
        max_rows=plan.max_running_requests,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_positions=plan.max_sequence_tokens,
    )
    plain = Format.of(dtype)
    loading, size = Loading.of(target.config.model), target.vocab_size
    with open_head(config, loading, dtype=dtype, vocab_size=size) as (head, fill):
        formats = WeightFormats(layers=plain, head=plain)
        builder = HeadProgramBuilder(head.decoder, team, shape, target.table, formats)
        program = builder.build_head(head, fill, forward.head)
    return NativePass(
        head,
        program,
        target.sampler.token_sampler,
        embedding=forward.embedding,
        embedding_scale=forward.residual_scale,
    )


def _torch_pass(
    target: Target, config: DraftHeadConfig, model: DecoderModel, stops: StopTokens
) -> tuple[TorchPass, DraftChain]:
    """Return the pass of a head on the target's device, and what collects its drafts."""
    plan, loading = head_plan(target.plan), Loading.of(target.config.model)
    with open_head(
        config, loading, dtype=model.dtype, vocab_size=target.vocab_size, device=plan.device
    ) as (head, fill):
        fill(None)
    most = max(plan.max_step_tokens, plan.max_running_requests)
    over = HeadModel(head, target_ends(model, target.plan), max_tokens=most)
    if plan.device == "cpu":
        head.pack()
        attention = device.make_attention(head.decoder, plan, plan.num_pages)
        eager = EagerForward(over, attention, page_size=plan.page_size)
        return TorchPass(over, eager, HostTokenSampler(sampling_kernels)), HostChain(stops)
    passes, forward = device_pass(over, head.decoder, plan, CudaGraphRunner)
    if target.config.engine.overlap is False or plan.on_device.attention_backend == "torch":
        return passes, HostChain(stops)
    stream = stream_of(torch.device(plan.device))
    return passes, DeviceChain(stops, forward, stream, most_id=target.vocab_size - 1)


def device_pass(
    over: HeadModel,
    decoder: DecoderModel,
    plan: EnginePlan,
    make_graphs: Callable[[], GraphRunner],
) -> tuple[TorchPass, DeviceForward]:
    """Return the pass of a head on a device, with the graphs of its plan, and what runs it.

    decoder:  of the head
    """
    decoder.tabulate_angles(plan.max_sequence_tokens)
    decoder.narrow_routers()
    attention = device.make_attention(decoder, plan, plan.num_pages)
    forward = device.forward_over(over, attention, plan)
    device.warm_up(forward, plan)
    token_sampler = device.make_token_sampler(plan, forward)
    if plan.on_device.graph_sizes:
        device.capture(forward, plan, make_graphs(), show_progress=False)
    return TorchPass(over, forward, token_sampler), forward


def head_plan(plan: EnginePlan) -> EnginePlan:
    """Return the plan of a head by itself: the target's rows and pages, on one rank.

    Its KV is not quantised, it has no adapters, and no row of it has drafts.
    """
    return replace(
        plan,
        speculation=None,
        windows=None,
        adapters=None,
        kv_dtype="auto",
        kv_skip_layers=(),
        kv_scales=(),
        tp_size=1,
        pp_size=1,
        micro_batches=1,
        on_device=replace(plan.on_device, symmetric_memory=False, compiled_rows=0),
    )


def target_states(forward: ForwardPass, model: DecoderModel, config: DraftHeadConfig) -> States:
    """Return what reads the states of a target that torch runs."""
    where = model.embedding.weight.device

    def final(tokens: Int64Array) -> Tensor:
        index = to_device(tokens, where)
        return forward.hidden(0, int(tokens.max()) + 1).index_select(0, index)

    def captured(tokens: Int64Array) -> Tensor:
        assert model.captures is not None, "the plan says what the head reads"
        return model.captures.states(to_device(tokens, where))

    return captured if config.captures else final
