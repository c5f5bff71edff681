"""The checks of `remora doctor model`: how a checkpoint would be served, and whether it can be.

Only headers of weight files are read. The report ends at the first error, except that missing
weights are reported and the checks go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.model_names import parse_model_name
from remora.configs.planning.draft_plan import DraftFacts, HeadFacts, plan_with_draft
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.loading import Loading
from remora.configs.planning.memory_report import report
from remora.configs.planning.plan import EnginePlan, make_plan
from remora.configs.planning.rounding import loss_of
from remora.configs.schema import ServeConfig
from remora.deployments.cli.doctor.findings import Finding, Level
from remora.deployments.cli.doctor.pooling import pooling_findings

NOT_SERVED = "not served"  # the subject of the error that ends a report
_MOST_OF_TARGET = 1 / 3  # of the bytes that a token reads, for a draft model's to pay


def examine_model(config: ServeConfig, path: Path, machine: MachineFacts) -> Iterator[Finding]:
    """Yield findings in the order in which the engine reads a model. A FIX is usually the last."""
    try:
        yield from _examine(config, path, machine)
    except ConfigError as error:
        yield Finding(Level.FIX, NOT_SERVED, str(error))


def _examine(config: ServeConfig, path: Path, machine: MachineFacts) -> Iterator[Finding]:
    from remora.engine.models.facts import read_model_facts
    from remora.engine.models.implementation import Ours, implementation_of
    from remora.engine.models.load import check_files
    from remora.engine.pooling.facts import pooling_task
    from remora.engine.spec.build import read_draft_facts
    from remora.engine.weights.files import weight_files

    loading = Loading.of(config.model)
    yield Finding(Level.OK, "model", f"{path}, {'a folder' if path.is_dir() else 'a GGUF file'}")
    task = pooling_task(path, config.model.task, config.model.config_overrides)
    if task is not None:
        for subject, text in pooling_findings(config, path, task, machine):
            yield Finding(Level.OK, subject, text)
        return
    chosen = implementation_of(path, loading)
    facts = read_model_facts(path, loading)
    yield Finding(Level.OK, "family", facts.architecture)
    if isinstance(chosen, Ours):
        yield Finding(Level.OK, "implementation", f"remora: {chosen.reason}")
    else:
        text = f"transformers on remora's KV cache: {chosen.reason}"
        yield Finding(Level.WARN, "implementation", text)
    size = f"{facts.num_parameters / 1e6:,.1f} million parameters in {facts.dtype}"
    try:
        files = check_files(path, config.model.load_format, loading)
        yield Finding(Level.OK, "weights", f"{size}, {files.partition(';')[0]}")
    except ConfigError as error:  # the plan is useful before the weights are downloaded
        is_remote = parse_model_name(config.model.path) is not None and path.is_dir()
        if is_remote and not weight_files(path, config.model.load_format):
            advice = f"not downloaded yet: remora pull {config.model.path}"
            yield Finding(Level.WARN, "weights", f"{size}; {advice}")
        else:
            yield Finding(Level.FIX, "weights", f"{size} expected: {error}")
    draft = read_draft_facts(config, facts)
    plan = plan_with_draft(config, facts, machine, path, draft=draft)
    if plan.stored:
        yield Finding(Level.OK, "quantised", plan.stored)
    if plan.rounding:
        loss = loss_of(plan.quantization, plan.formats)
        cost = f"; a small model lost {loss} of perplexity by it" if loss else ""
        yield Finding(Level.OK, "rounded", f"on loading, to {plan.rounding}{cost}")
    yield from _smaller(plan, config, facts, machine)
    yield from _drafts(plan, facts, draft)
    yield from _kv_format(plan, config, facts)
    yield _kernels(plan, chosen.config if isinstance(chosen, Ours) else None)
    yield from _memory(plan, facts)
    yield from _texts(config, path, facts)


def _smaller(
    plan: EnginePlan, config: ServeConfig, facts: ModelFacts, machine: MachineFacts
) -> Iterator[Finding]:
    """Say what rounding would make of 16-bit weights on a CPU, and its cost in quality."""
    is_native = plan.device == "cpu" and plan.cpu_kernels != "torch" and plan.num_ranks == 1
    if plan.stored or plan.rounding or not is_native or facts.implementation != "remora":
        return
    offers = []
    for name in ("int8", "int4"):
        model = config.model.model_copy(update={"quantization": name})
        with suppress(ConfigError):
            rounded = make_plan(
                config.model_copy(update={"model": model}), facts, machine, plan.model_path
            )
            size = human_bytes(rounded.weight_bytes)
            offers.append(f"{name} {size} ({loss_of(name, rounded.formats)} of perplexity)")
    if offers:
        text = f"model.quantization could round the weights: {', '.join(offers)}"
        yield Finding(Level.OK, "smaller", text)


def _drafts(
    plan: EnginePlan, facts: ModelFacts, draft_facts: DraftFacts | HeadFacts | None
) -> Iterator[Finding]:
    """Name the draft model or head, and warn of a model that is too large to pay."""
    spec, draft = plan.speculation, plan.draft
    if spec is not None and spec.head_bytes:
        yield Finding(
            Level.OK, "drafts", f"{spec.method}, {human_bytes(spec.head_bytes)} of weights"
        )
    if draft is None or not isinstance(draft_facts, DraftFacts):
        return
    text = (
        f"{draft.served_model_name}, {human_bytes(draft.weight_bytes)} of weights and "
        f"{human_bytes(draft.kv_bytes)} of KV cache"
    )
    share = _read_bytes(draft, draft_facts.model) / _read_bytes(plan, facts)
    if share <= _MOST_OF_TARGET:
        yield Finding(Level.OK, "drafts", text)
    else:
        text += (
            f": a token reads {share:.0%} of the bytes that the model's own reads, so drafts will "
            "hardly pay; use a smaller one"
        )
        yield Finding(Level.WARN, "drafts", text)


def _read_bytes(plan: EnginePlan, facts: ModelFacts) -> float:
    """Return the bytes of weights that a token reads: of experts, only its own."""
    from remora.deployments.bench.roofline import model_work
    from remora.engine.models.implementation import Ours, implementation_of

    chosen = implementation_of(plan.model_path, plan.loading)
    if not isinstance(chosen, Ours):
        return plan.weight_bytes
    work = model_work(chosen.config, dtype=plan.dtype)
    num_read = work.block_parameters + work.head_parameters
    return plan.weight_bytes * min(1.0, num_read / facts.num_parameters)


def _kv_format(plan: EnginePlan, config: ServeConfig, facts: ModelFacts) -> Iterator[Finding]:
    from remora.engine.models.kv_scales import with_kv_scales

    if plan.kv_dtype == "auto":
        return
    try:
        plan = with_kv_scales(plan, config, facts)
    except ConfigError as error:
        yield Finding(Level.FIX, "KV format", str(error))
        return
    scales = f"static scales of {plan.kv_scales_of}" if plan.kv_scales else "scales of tokens"
    yield Finding(Level.OK, "KV format", f"{plan.kv_dtype}, {scales}")


def _kernels(plan: EnginePlan, own: object) -> Finding:
    from remora.engine.models.config import DecoderConfig
    from remora.engine.runner.forward import check_covered
    from remora.kernels.cpu.build import NativeUnavailable

    if not isinstance(own, DecoderConfig):
        return Finding(Level.OK, "kernels", f"torch, eager, on {plan.device}")
    if plan.device != "cpu":
        return Finding(Level.OK, "kernels", f"{plan.on_device.attention_backend} on {plan.device}")
    if plan.cpu_kernels == "torch":
        return Finding(Level.OK, "kernels", "torch, set by engine.cpu_kernels")
    try:
        check_covered(own, plan, plan.num_ranks)
    except NativeUnavailable as reason:
        return Finding(Level.WARN, "kernels", f"torch, which is slower: {reason}")
    return Finding(Level.OK, "kernels", "native step program")


def _memory(plan: EnginePlan, facts: ModelFacts) -> Iterator[Finding]:
    found = report(plan, facts, is_native=False)
    of_rank = f" of each of {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    in_what = "" if plan.stored else f" in {plan.rounding or plan.dtype}"
    text = (
        f"{human_bytes(found.weight_bytes)} of weights{in_what}{of_rank}; "
        f"{human_bytes(found.kv_token_bytes)} of KV cache per token; see `remora plan` for details"
    )
    yield Finding(Level.OK, "memory", text)
    is_enough = plan.max_sequence_tokens == plan.max_model_len
    held = f"memory holds only {plan.max_sequence_tokens:,}"
    yield Finding.of(is_enough, "context", f"{plan.max_model_len:,} tokens", held)


def _texts(config: ServeConfig, path: Path, facts: ModelFacts) -> Iterator[Finding]:
    from remora.deployments.parsers.format_choice import choose_formats
    from remora.engine.tokens.configured import configured_tokenizer

    tokenizer = configured_tokenizer(config.model, path, vocab_size=facts.vocab_size)
    if not tokenizer.takes_text:
        yield Finding(Level.OK, "tokenizer", "none, set by model.skip_tokenizer")
        return
    level = Level.OK if tokenizer.vocab_size <= facts.vocab_size else Level.WARN
    ids = f"{tokenizer.vocab_size:,} ids; the model has {facts.vocab_size:,}"
    yield Finding(level, "tokenizer", ids)
    if tokenizer.template_source is None:
        text = "none: chats get HTTP 400; set model.chat_template"
        yield Finding(Level.WARN, "chat template", text)
    else:
        yield Finding(Level.OK, "chat template", f"from {tokenizer.template_place}")
    chosen = choose_formats(tokenizer, config.api.tool_parser, config.api.reasoning_parser)
    both = None if chosen.checkpoint is None else type(chosen.checkpoint).__name__
    tools = chosen.tools.name if chosen.tools else both or "none"
    reasoning = chosen.reasoning.name if chosen.reasoning else both or "none"
    yield Finding(Level.OK, "parsers", f"tool calls: {tools}; reasoning: {reasoning}")
