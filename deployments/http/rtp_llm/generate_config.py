"""RTP-LLM's `generate_config`: its fields, which of them are served, and how the engine calls them.

It knows no prompts and no model. SERVED_AS has the engine's names of fields whose names differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from remora.deployments.http.core.body_limits import AtMost, check_size
from remora.deployments.http.core.fields import (
    Body,
    Count,
    Seed,
    StopTexts,
    TaskId,
    fault,
    is_token_list,
    unsupported_part,
)
from remora.deployments.http.generation.constraints import ConstraintBody

# Engine's name of a parameter -> field.
SERVED_AS: Mapping[str, str] = MappingProxyType(
    {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "n": "num_return_sequences",
        "seed": "random_seed",
        "stop": "stop_words_str",
        "stop_token_ids": "stop_words_list",
        "bad_words": "bad_words_list",
        "bad_words_ids": "bad_words_list",
        "hidden_states": "return_hidden_states",
    }
)
# Other name of a field -> field. Both are not sent together.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "gen_length": "max_new_tokens",
        "output_hidden_states": "return_hidden_states",
        "output_input_ids": "return_input_ids",
    }
)
_MAX_NAMES = 4096


def off(*harmless: Any, instead: str = "leave it out") -> PlainValidator:
    """Return a validator for a field that is not available, with values that do not ask for it.

    instead:  what to do, for the error
    """
    allowed = " or ".join(map(json.dumps, harmless)) or "null"

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(v) and value == v for v in harmless):
            raise unsupported_part(f"not available here, only {allowed} is accepted; {instead}")
        return value

    return PlainValidator(check)


def _check_id_or_ids(value: Any) -> Any:
    if value is not None and type(value) is not int and not is_token_list(value):
        raise fault("must be a token id, or a list of token ids")
    return value


def _check_stop_ids(value: Any) -> list[int] | None:
    """Return the token ids of lists of one id each."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(is_token_list(ids) and ids for ids in value):
        raise fault("must be a list of lists of token ids, such as [[2], [13]]")
    check_size("max_stops", value)
    if any(len(ids) > 1 for ids in value):
        raise unsupported_part(
            "only lists of one token id can be served; send the text of longer ones in "
            "stop_words_str"
        )
    return [ids[0] for ids in value]


def _check_runs(value: Any) -> list[list[int]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(is_token_list(ids) and ids for ids in value):
        raise fault("must be a list of lists of token ids, such as [[5, 6], [7]]")
    return value


def _check_timeout(value: Any) -> int | None:
    """Return a time in milliseconds; None = there is no limit."""
    if value is not None and (type(value) is not int or not -1 <= value < 2**31):
        raise fault("must be a whole number of milliseconds; -1 and 0 are no limit")
    return value if value is not None and value > 0 else None


def _check_adapters(value: Any) -> str | list[str] | None:
    if value is None:
        return None
    names: list[str] = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fault("must be a name, or a list of names, one for each prompt")
    if len(names) > _MAX_NAMES or any(len(name) > 1024 for name in names):
        raise fault("holds too many names, or names that are too long")
    return value if isinstance(value, str) else names


Positive = Annotated[int, Field(ge=1, lt=2**31)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
IdOrIds = Annotated[Any, PlainValidator(_check_id_or_ids), WithJsonSchema({"type": "integer"})]


class RtpHints(Body):
    """Fields that are accepted without effect, since none of them can change an answer here.

    They name the request or the client, choose among caches that hold the same values, or belong
    to features that are off. docs/http-api.md has the same list.
    """

    max_input_tokens: Whole | None = None
    top_p_min: Number | None = None
    top_p_reset_ids: IdOrIds = None
    pad_token_id: IdOrIds = None
    bos_token_id: IdOrIds = None
    traffic_reject_priority: Whole | None = None
    chat_id: str | None = None
    trace_id: str | None = None
    unique_key: str | None = None
    md5_value: str | None = None
    custom_prop: str | None = None
    sp_advice_prompt_token_ids: list[int] | None = None
    sp_edit: bool | None = None
    can_use_pd_separation: bool | None = None
    gen_timeline: bool | None = None
    profile_step: Whole | None = None
    inter_request_id: Whole | None = None
    global_request_id: Whole | None = None
    add_vision_id: bool | None = None
    tool_call_message_extract_strategy: str | None = None
    max_thinking_tokens: Whole | None = None
    end_think_token_ids: list[int] | None = None
    enable_memory_cache: bool | None = None
    enable_memory_block_cache: bool | None = None
    enable_remote_cache: bool | None = None
    enable_device_cache: bool | None = None
    sync_wait_write: bool | None = None
    force_batch: bool | None = None
    batch_group_timeout: Whole | None = None
    prompt_logits_top_k: Whole | None = None
    prompt_logits_start: Whole | None = None
    prompt_logits_end: Whole | None = None
    return_target_logprob: bool | None = None


class RtpUnserved(Body):
    """Fields of `generate_config` of which only values that switch them off can be served."""

    variable_num_beams: Annotated[Any, off([], instead="send num_beams")] = None
    no_repeat_ngram_size: Annotated[Any, off(0, instead="see repetition_penalty")] = None
    combo_token_size: Annotated[Any, off(0, instead="see bad_words_list")] = None
    banned_combo_token_ids: Annotated[Any, off([], instead="see bad_words_list")] = None
    auto_parse_banned_combo: Annotated[Any, off(False)] = None
    enable_cross_sequence_ban: Annotated[Any, off(False)] = None
    top_p_decay: Annotated[Any, off(1.0, 1, instead="send top_p alone")] = None
    eos_token_id: Annotated[Any, off(instead="send further ids in stop_words_list")] = None
    using_hf_sampling: Annotated[Any, off(False)] = None
    ttft_timeout_ms: Annotated[Any, off(-1, 0, instead="send timeout_ms")] = None
    request_format: Annotated[Any, off("raw", instead="see /v1/chat/completions")] = None
    calculate_loss: Annotated[Any, off(0, False, instead="see /v1/completions")] = None
    return_logits: Annotated[Any, off(False, instead="see return_softmax_probs")] = None
    output_logits: Annotated[Any, off(False, instead="see return_softmax_probs")] = None
    return_prompt_logits: Annotated[Any, off(False, instead="see /v1/completions")] = None
    return_all_probs: Annotated[Any, off(False, 0, instead="see return_softmax_probs")] = None
    logits_index: Annotated[Any, off()] = None
    hidden_states_cut_dim: Annotated[Any, off(0)] = None
    normalized_hidden_states: Annotated[Any, off(False)] = None
    select_tokens_str: Annotated[Any, off([])] = None
    select_tokens_id: Annotated[Any, off([])] = None
    force_sp_accept: Annotated[Any, off(False)] = None
    role_addrs: Annotated[Any, off([])] = None
    resized_shape: Annotated[Any, off([], instead="send text")] = None
    in_think_mode: Annotated[Any, off(False, instead="see /v1/chat/completions")] = None
    chat_template_kwargs: Annotated[Any, off({}, instead="see /v1/chat/completions")] = None


class RtpConfig(RtpHints, RtpUnserved, ConstraintBody):
    """`generate_config`.

    num_return_sequences:  0 = one answer, not in a list
    top_p:                 0 = off where there is a top_k, else the most likely token
    print_stop_words:      whether the text that ends an answer is part of it
    return_incremental:    whether an event of a stream holds new text only
    out_prefix:            text before each answer
    reuse_cache:           false = no page of the prefix cache is used
    sp_advice_prompt:      expected text, a source of drafts
    force_disable_sp_run:  true = no drafts
    """

    max_new_tokens: Positive | None = None
    gen_length: Positive | None = None
    min_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    random_seed: Seed | None = None
    num_beams: Count | None = None
    num_return_sequences: Annotated[int, Field(ge=0), AtMost("max_n")] | None = None
    stop_words_str: StopTexts | None = None
    stop_words_list: Annotated[
        list[int] | None, PlainValidator(_check_stop_ids), WithJsonSchema({"type": "array"})
    ] = None
    bad_words_list: Annotated[
        list[list[int]] | None, PlainValidator(_check_runs), WithJsonSchema({"type": "array"})
    ] = None
    print_stop_words: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    timeout_ms: Annotated[
        int | None, PlainValidator(_check_timeout), WithJsonSchema({"type": "integer"})
    ] = None
    task_id: TaskId | None = None
    adapter_name: Annotated[
        str | list[str] | None,
        PlainValidator(_check_adapters),
        WithJsonSchema({"type": ["string", "array"]}),
    ] = None
    reuse_cache: bool | None = None
    sp_advice_prompt: str | None = None
    force_disable_sp_run: bool | None = None
    out_prefix: Annotated[str, Field(max_length=65_536)] | None = None
    aux_info: bool | None = None
    return_incremental: bool | None = None
    return_input_ids: bool | None = None
    output_input_ids: bool | None = None
    return_output_ids: bool | None = None
    return_hidden_states: bool | None = None
    output_hidden_states: bool | None = None
    return_all_hidden_states: bool | None = None
    return_cum_log_probs: bool | None = None
    return_softmax_probs: bool | None = None
    yield_generator: bool | None = None
    is_streaming: bool | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for alias, name in ALIASES.items():
            if getattr(self, alias) is not None and getattr(self, name) is not None:
                raise fault(f"is another name of {name}; send one of them", param=alias)
        if (self.min_new_tokens or 0) > (self.max_new_tokens or self.gen_length or 2**31):
            raise fault("must not be greater than max_new_tokens", param="min_new_tokens")
        return self

    def given(self) -> dict[str, Any]:
        """Return the fields that are set, under their first names."""
        values = ((name, getattr(self, name)) for name in RtpConfig.model_fields)
        return {ALIASES.get(name, name): value for name, value in values if value is not None}

    @property
    def n(self) -> int:
        """The number of answers to each prompt: all beams, unless fewer are asked for."""
        return self.num_return_sequences or max(1, self.num_beams or 1)

    @property
    def is_list(self) -> bool:
        """Whether the answers to a prompt are in lists."""
        return bool(self.num_return_sequences)
