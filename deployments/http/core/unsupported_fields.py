"""Known fields that are not supported: a request that uses one is refused, never silently accepted.

Fields of a body's own model are supported for that body, even if the table lists them. A row holds
the harmless values, which have no effect and are accepted. Any other value is a 400 with the
field's name and the code `unsupported`. None is always harmless. Fields in no table and no model
are unknown; they are reported as ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from remora.deployments.http.core.errors import unsupported

_TOOLS = "Tools belong to the bodies of chats."
_GRAMMAR = "A constraint of this name cannot be held to here, so it would not be enforced."
_ADAPTERS = "Name the adapter in `model`: ADAPTER or MODEL:ADAPTER."
_MEDIA = "Only text can be sent and received."
_EMBEDDINGS = (
    "Prompts given as embeddings belong to SGLang's /generate (input_embeds) and to "
    "/v1/completions (prompt_embeds); elsewhere send text or token ids."
)
_SAMPLING = "This way of choosing tokens is not supported."
_TEMPLATE = "This is not supported here; it belongs to chats, whose template is the model's own."
_ROUTING = "This kind of routing is not supported."
_OUTPUT = "This output is not available."
_CHOSEN = (
    "Log-probabilities of chosen tokens belong to chats and text completions (logprob_token_ids) "
    "and to SGLang's /generate (token_ids_logprob)."
)
_PREDICTION = "Predicted outputs belong to the bodies of /v1/chat/completions."
_RTP_CHAT = (
    "Fields of RTP-LLM's chats are not read: send top_k, seed, stop and others in the body itself; "
    "/chat/render shows the prompt."
)
_EMPTY: tuple[Any, ...] = (False, [], {}, "")

_ROWS: dict[str, tuple[str, tuple[tuple[str, tuple[Any, ...]], ...]]] = {
    "tools": (
        _TOOLS,
        (
            ("tools", _EMPTY),
            ("tool_choice", ("none",)),
            ("functions", _EMPTY),
            ("function_call", ("none",)),
            ("web_search_options", ()),
        ),
    ),
    "grammar": (
        _GRAMMAR,
        (
            ("response_format", ({"type": "text"},)),
            ("structured_outputs", ()),
            ("guided_json", ()),
            ("guided_regex", ()),
            ("guided_choice", ()),
            ("guided_grammar", ()),
            ("guided_json_object", (False,)),
            ("guided_decoding_backend", ()),
            ("guided_whitespace_pattern", ()),
            ("json_schema", ()),
            ("regex", ()),
            ("ebnf", ()),
            ("grammar", ()),
            ("structural_tag", ()),
        ),
    ),
    "adapters": (_ADAPTERS, (("lora_path", ()), ("adapter", ()), ("adapter_id", ()))),
    "media": (
        _MEDIA,
        (
            ("modalities", (["text"],)),
            ("audio", ()),
            ("image_data", _EMPTY),
            ("audio_data", _EMPTY),
            ("video_data", _EMPTY),
            ("mm_processor_kwargs", _EMPTY),
            ("media_io_kwargs", _EMPTY),
        ),
    ),
    "embeddings": (_EMBEDDINGS, (("prompt_embeds", _EMPTY), ("input_embeds", _EMPTY))),
    "sampling": (
        _SAMPLING,
        (
            ("use_beam_search", (False,)),
            ("num_beams", (1,)),
            ("num_beam_groups", (1,)),
            ("diversity_penalty", (0.0, 0)),
            ("length_penalty", (1.0, 1)),
            ("early_stopping", (False,)),
            ("stop_regex", _EMPTY),
            ("bad_words", _EMPTY),
            ("allowed_token_ids", ()),
            ("logits_processors", _EMPTY),
            ("repetition_detection", _EMPTY),
            ("vllm_xargs", _EMPTY),
            ("verbosity", ("medium",)),
            ("suffix", ("",)),
            ("truncate_prompt_tokens", ()),
            ("truncation_side", ()),
            ("spaces_between_special_tokens", (True, False)),
        ),
    ),
    "template": (
        _TEMPLATE,
        (
            ("chat_template", ()),
            ("documents", _EMPTY),
            ("reasoning_effort", ("none",)),
            ("reasoning", _EMPTY),
            ("thinking_token_budget", ()),
        ),
    ),
    "routing": (
        _ROUTING,
        (
            ("data_parallel_rank", ()),
            ("kv_transfer_params", _EMPTY),
            ("bootstrap_host", ()),
            ("bootstrap_port", ()),
            ("bootstrap_room", ()),
            ("session_params", _EMPTY),
            ("extra_key", ("",)),
            ("store", (False,)),
            ("service_tier", ("auto", "default")),
        ),
    ),
    "rtp_chat": (
        _RTP_CHAT,
        (
            ("extra_configs", ({},)),
            ("user_template", ("",)),
            ("template_key", ("",)),
            ("debug_info", (False,)),
        ),
    ),
    "prediction": (_PREDICTION, (("prediction", ()),)),
    "chosen": (_CHOSEN, (("logprob_token_ids", _EMPTY), ("token_ids_logprob", _EMPTY))),
    "output": (
        _OUTPUT,
        (
            ("return_hidden_states", (False,)),
            ("return_prompt_text", (False,)),
            ("return_cached_tokens_details", (False,)),
            ("return_meta_info", (False,)),
            ("stream_interval", (1,)),
        ),
    ),
}

FIELDS: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {name: (message, harmless) for message, rows in _ROWS.values() for name, harmless in rows}
)


def refuse_unsupported(body: Mapping[str, Any], *, prefix: str = "") -> None:
    """Raise InvalidRequest for the first field with an unsupported value.

    body:  without the fields of its own model
    """
    for name in filter(FIELDS.__contains__, body):
        message, harmless = FIELDS[name]
        if body[name] is not None and not _is_among(body[name], harmless):
            raise unsupported(prefix + name, f"{prefix}{name}: {message}")


def _is_among(value: Any, harmless: tuple[Any, ...]) -> bool:
    # Compare the types too, since False == 0 and True == 1.
    return any(type(value) is type(one) and value == one for one in harmless)
