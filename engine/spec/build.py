"""Builds speculation as a plan says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.planning.draft_plan import DraftFacts, HeadFacts, check_target, draft_config
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import EnginePlan, pick_dtype
from remora.configs.planning.speculation_plan import SpeculationPlan
from remora.configs.schema import ServeConfig
from remora.engine.graphs.device_stream import stream_of
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import open_served_model
from remora.engine.models.locate import locate_draft
from remora.engine.runner.forward import DTYPES, build_forward
from remora.engine.spec.controller import AdaptiveController, Controller, FixedController
from remora.engine.spec.draft_chain import DeviceChain, DraftChain, HostChain
from remora.engine.spec.draft_model import DraftModel
from remora.engine.spec.drafter import Drafter, PendingProposer
from remora.engine.spec.heads.build import build_head_drafter, head_facts, read_head_config
from remora.engine.spec.ngram import NgramProposer
from remora.engine.spec.proposer import Proposer
from remora.engine.spec.speculation import PossibleDrafts, Speculation
from remora.engine.spec.stop_tokens import StopTokens
from remora.engine.spec.target import Target
from remora.engine.tokens.configured import configured_tokenizer
from remora.engine.tokens.tokenizer import Tokenizer

_NUM_COMPARED = 512  # tokens whose bytes must agree, spread over the vocabulary


def build_speculation(
    plan: EnginePlan,
    *,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    possible_drafts: PossibleDrafts,
) -> Speculation | None:
    """Return the plan's speculation; None if it has none."""
    spec = plan.speculation
    if spec is None:
        return None
    return Speculation(
        make_proposer(spec),
        make_controller(spec),
        source=spec.method,
        max_drafts=spec.max_drafts,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        max_tokens=spec.max_tokens,
        possible_drafts=possible_drafts,
    )


def make_proposer(spec: SpeculationPlan) -> Proposer:
    """Return the plan's source of drafts."""
    if spec.method != "ngram":
        return PendingProposer()
    return NgramProposer(
        shortest=spec.shortest,
        longest=spec.longest,
        max_bytes=spec.max_bytes,
        max_shared_bytes=spec.max_shared_bytes,
    )


def make_controller(spec: SpeculationPlan) -> Controller:
    """Return what chooses draft lengths."""
    return (
        AdaptiveController(spec.max_drafts)
        if spec.is_adaptive
        else FixedController(spec.max_drafts)
    )


def read_draft_facts(config: ServeConfig, model: ModelFacts) -> DraftFacts | HeadFacts | None:
    """Return the facts of the configured draft model or head; None if there is none.

    model:  that it drafts for
    Raises ConfigError.
    """
    section = config.speculation
    if section.method in ("eagle", "mtp"):
        check_target(config, model)
        head, dtype = read_head_config(config), pick_dtype(config, model)
        return head_facts(head, model, dtype, config.parallel.num_ranks)
    if section.method != "draft" or section.draft_model is None:
        return None
    path = locate_draft(config)
    assert path is not None
    return DraftFacts(path, read_model_facts(path, Loading.of(draft_config(config).model)))


def build_drafter(target: Target) -> Drafter | None:
    """Load the draft model or head of a target's plan; None if it has none.

    Raises ConfigError if its vocabulary is another one.
    """
    plan, kernels = target.plan, target.cache / "kernels"
    own = plan.draft
    if plan.speculation is not None and plan.speculation.method in ("eagle", "mtp"):
        return build_head_drafter(target)
    if own is None:
        return None
    with open_served_model(
        own.model_path,
        dtype=DTYPES[own.dtype],
        load_format=own.load_format,
        device=own.device,
        show_progress=False,
        loading=own.loading,
        held=own.on_device.held_weights,
    ) as (model, fill):
        _check_vocabulary(target.config, own.model_path, target.tokenizer, model.vocab_size)
        team = target.built.team
        built = build_forward(model, own, target.table, kernels, fill=fill, team=team)
    stops = StopTokens(target.tokenizer.eos_token_ids, target.vocab_size)
    chain: DraftChain = HostChain(stops)
    if built.device_tokens is not None:
        stream = stream_of(torch.device(own.device))
        chain = DeviceChain(stops, built.device_tokens, stream, most_id=model.vocab_size - 1)
    return DraftModel(
        built.forward,
        built.token_sampler,
        chain,
        target.sampler,
        target.table,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_tokens=plan.max_step_tokens,
        draft_vocab_size=model.vocab_size,
        vocab_size=target.vocab_size,
    )


def _check_vocabulary(
    config: ServeConfig, path: Path, tokenizer: Tokenizer, vocab_size: int
) -> None:
    """Raise ConfigError unless ids mean the same in the draft model's vocabulary."""
    if config.model.skip_tokenizer:
        return
    own = configured_tokenizer(draft_config(config).model, path, vocab_size=vocab_size)
    size = tokenizer.vocab_size
    differing = [
        token_id
        for token_id in range(0, min(size, own.vocab_size), max(1, size // _NUM_COMPARED))
        if tokenizer.token_bytes(token_id) != own.token_bytes(token_id)
    ]
    if size != own.vocab_size or differing:
        found = (
            f"has {own.vocab_size} tokens, and the model has {size}"
            if size != own.vocab_size
            else f"has {own.token_text(differing[0])!r} as token {differing[0]}, and the model has "
            f"{tokenizer.token_text(differing[0])!r}"
        )
        raise ConfigError(
            f"speculation.draft_model: its tokenizer {found}; a draft model needs the same "
            "vocabulary, such as a smaller model of the same family. speculation.method ngram "
            "works with any model"
        )
