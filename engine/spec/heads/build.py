"""Reads and builds the draft head of a configuration."""

from __future__ import annotations

from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.planning.draft_plan import HeadFacts
from remora.configs.planning.loading import Loading
from remora.configs.schema import ServeConfig
from remora.engine.graphs.step_builder import StepShape
from remora.engine.graphs.step_program import StepProgram
from remora.engine.graphs.step_weights import WeightFormats
from remora.engine.models.checkpoint import read_config, read_raw_config
from remora.engine.runner.forward import DTYPES
from remora.engine.spec.heads.config import DraftHeadConfig, read_eagle, read_mtp
from remora.engine.spec.heads.drafter import HeadDrafter
from remora.engine.spec.heads.head import DraftHead, open_head, open_stored_head
from remora.engine.spec.heads.program import HeadProgramBuilder
from remora.engine.spec.target import Target
from remora.engine.weights.resolve_model import resolve_model
from remora.kernels.cpu.library import Format


def read_head_config(config: ServeConfig, cache: Path) -> DraftHeadConfig:
    """Read the config of the configured draft head. Raises ConfigError."""
    path = resolve_model(config.model.path, cache)
    overrides = config.model.config_overrides
    target = read_config(path, overrides)
    if config.speculation.method == "mtp":
        return read_mtp(path, target, read_raw_config(path, overrides))
    assert config.speculation.draft_model is not None, "the section demands it"
    own = resolve_model(config.speculation.draft_model, cache)
    shapes = open_stored_head(own, Loading.of(config.model)).shapes()
    return read_eagle(own, target, shapes)


def head_facts(head: DraftHeadConfig, dtype: str) -> HeadFacts:
    """Return the facts that a plan needs; `dtype`: in which the target computes."""
    decoder, kind = head.decoder, DTYPES[dtype]
    return HeadFacts(
        path=head.path,
        weight_bytes=DraftHead(head, dtype=kind, device="meta").num_bytes,
        token_bytes=2 * decoder.num_kv_heads * decoder.head_dim * kind.itemsize,
        captures=head.captures,
        max_position=decoder.max_position,
    )


def build_head_drafter(target: Target) -> HeadDrafter:
    """Load the configured draft head. Raises ConfigError."""
    config, plan = target.config, target.plan
    forward, team = target.built.forward, target.built.team
    if not isinstance(forward, StepProgram) or team is None:
        raise ConfigError(
            f"speculation.method = {config.speculation.method} needs the native CPU kernels, and "
            f"the model runs with {target.built.description}; speculation.method ngram works there"
        )
    head_config, dtype = read_head_config(config, target.cache), DTYPES[plan.dtype]
    shape = StepShape(
        max_tokens=plan.max_step_tokens,
        max_rows=plan.max_running_requests,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_positions=plan.max_sequence_tokens,
    )
    plain = Format.of(dtype)
    loading, size = Loading.of(config.model), target.vocab_size
    with open_head(head_config, loading, dtype=dtype, vocab_size=size) as (head, fill):
        formats = WeightFormats(layers=plain, head=plain)
        builder = HeadProgramBuilder(head.decoder, team, shape, target.table, formats)
        program = builder.build_head(head, fill, forward.head)
    return HeadDrafter(
        head,
        program,
        target.sampler,
        target.table,
        states=forward.captured if head_config.captures else forward.final,
        embedding=forward.embedding,
        embedding_scale=forward.residual_scale,
        max_tokens=plan.max_step_tokens,
        vocab_size=target.vocab_size,
        eos_token_ids=target.tokenizer.eos_token_ids,
    )
