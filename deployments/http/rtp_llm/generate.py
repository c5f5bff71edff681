"""RTP-LLM's / and /batch_infer: from a body to a job.

As in RTP-LLM, the model's generation_config is not used: tokens are drawn at a temperature of 1
unless the body says otherwise, control tokens are part of the text, and an answer that would not
fit is cut at the end of the context.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from remora.configs.errors import InvalidRequest, RequestError
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.field_names import retold
from remora.deployments.http.core.fields import SamplingBody
from remora.deployments.http.generation.constraints import OutputConstraint, output_constraint
from remora.deployments.http.generation.endpoint import Endpoint
from remora.deployments.http.generation.prompts import usual_cut
from remora.deployments.http.generation.request import (
    GenerationRequest,
    PromptSettings,
    check_hidden,
    prepare,
)
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.sampling import as_seed, beam_params, sampling_params
from remora.deployments.http.generation.server_state import ServedModel, ServerState
from remora.deployments.http.rtp_llm.answers import RtpJob
from remora.deployments.http.rtp_llm.bodies import RtpBody, parse_rtp, parse_rtp_batch
from remora.deployments.http.rtp_llm.generate_config import RtpConfig
from remora.engine.types import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 32_000
# Fields with the engine's names.
_SAME = (
    *("temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "ignore_eos", "num_beams"),
)


async def prepare_rtp(server: ServerState, body: RtpBody, context: RequestContext) -> RtpJob:
    """Check everything that can be checked without the engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    with _in_callers_words(body):
        config = body.config
        _check_stream(body, config)
        if config.timeout_ms is not None:
            context = replace(context, timeout_s=config.timeout_ms / 1e3)
        models = await _models(server, body, config)
        sampling, constraint = _sampling(server, config), _constraint(server, config)
        # Entries of the prefix cache are shared among equal salts.
        salt = secrets.token_hex(8) if config.reuse_cache is False else ""
        wanted = config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        limit = server.plan.max_sequence_tokens
        options = PromptSettings(
            cut=usual_cut(server, wanted if wanted < limit else None),
            task=server.tasks.ids(config.task_id),
            param=body.prompt_name,
            scored_param=_scored_name(config),
            is_scored_whole=not body.streams or not config.return_incremental,
            is_repeated=body.streams and not config.return_incremental,
        )
        made = [
            GenerationRequest(
                prompt=prompt,
                sampling=sampling,
                model=model,
                default_max_tokens=wanted,
                constraint=constraint,
                cache_salt=salt,
                prediction=config.sp_advice_prompt,
            )
            for prompt, model in zip(body.prompts, models, strict=True)
        ]
        requests = await prepare(server, context, made, options)
        check_hidden(server, requests)
    return RtpJob(
        context=context,
        requests=requests,
        streams=body.streams,
        config=config,
        is_batch=body.is_batch,
    )


@contextmanager
def _in_callers_words(body: RtpBody) -> Generator[None, None, None]:
    try:
        yield
    except RequestError as error:
        raise retold(error, body.sent_name) from None


def _check_stream(body: RtpBody, config: RtpConfig) -> None:
    if body.streams:
        return
    for name in ("is_streaming", "return_incremental"):
        if getattr(config, name):
            message = f"{name} needs a stream; set yield_generator to true, or leave it out."
            raise InvalidRequest(message, name)


async def _models(server: ServerState, body: RtpBody, config: RtpConfig) -> list[ServedModel]:
    """Return the model of each prompt. Raises RequestError."""
    model, names = await server.model(body.model), config.adapter_name
    num = len(body.prompts)
    if names is None:
        return [model] * num
    if isinstance(names, list) and len(names) != num:
        message = f"adapter_name has {len(names)} names for {num} prompts; send one for each."
        raise InvalidRequest(message, "adapter_name")
    adapters = [
        await server.model(name, "adapter_name")
        for name in (names if isinstance(names, list) else [names] * num)
    ]
    if any(model.lora_id not in (0, adapter.lora_id) for adapter in adapters):
        message = "adapter_name and model name different adapters; send one of them."
        raise InvalidRequest(message, "adapter_name")
    return adapters


def _sampling(server: ServerState, config: RtpConfig) -> SamplingParams:
    vocab_size = server.tokenizer.vocab_size
    given: dict[str, Any] = {name: getattr(config, name) for name in _SAME}
    if given["top_p"] == 0:
        # Without a top_k either, only the most likely token is left.
        given["top_p"] = 1.0
        if not given["top_k"]:
            given["temperature"] = 0.0
    if config.do_sample is False:
        given["temperature"] = 0.0
    fields = SamplingBody.model_construct(
        **given,
        n=config.n,
        stop=config.stop_words_str,
        stop_token_ids=config.stop_words_list,
        skip_special_tokens=bool(config.skip_special_tokens),
        max_drafts=0 if config.force_disable_sp_run else None,
    )
    is_scored = config.return_cum_log_probs or config.return_softmax_probs
    return sampling_params(
        fields,
        defaults={},
        vocab_size=vocab_size,
        max_tokens=None,
        min_tokens=config.min_new_tokens or 0,
        seed=as_seed(config.random_seed),
        include_stop_in_output=bool(config.print_stop_words),
        logprobs=0 if is_scored else None,
        hidden_states=bool(config.return_hidden_states or config.return_all_hidden_states),
        bad_words_ids=_bans(config, vocab_size),
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
        beams=beam_params(fields, n=config.n),
    )


def _bans(config: RtpConfig, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the banned runs; those with ids beyond the vocabulary never occur."""
    runs = [tuple(ids) for ids in config.bad_words_list or ()]
    return tuple(run for run in runs if all(0 <= id_ < vocab_size for id_ in run))


def _constraint(server: ServerState, config: RtpConfig) -> OutputConstraint | None:
    found = output_constraint(server, config)
    if found is not None and config.bad_words_list:
        message = f"bad_words_list cannot be combined with {found.param}; send one of them."
        raise unsupported("bad_words_list", message)
    return found


def _scored_name(config: RtpConfig) -> str:
    return "return_softmax_probs" if config.return_softmax_probs else "return_cum_log_probs"


RTP: Endpoint[RtpBody] = Endpoint(parse_rtp, prepare_rtp, kind="completion")
RTP_BATCH: Endpoint[RtpBody] = Endpoint(parse_rtp_batch, prepare_rtp, kind="completion")
