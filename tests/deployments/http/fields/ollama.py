"""Fields of Ollama's and llama.cpp's bodies."""

from __future__ import annotations

from remora.deployments.http.llamacpp.bodies import (
    ApplyTemplateBody,
    InfillBody,
    LlamaCompletionBody,
    LlamaTokenizeBody,
)
from remora.deployments.http.ollama.bodies import (
    OllamaChatBody,
    OllamaGenerateBody,
    PullBody,
    ShowBody,
)
from tests.deployments.http.fields.chats import PROMPT
from tests.deployments.http.fields.observing import Api, Rows, effect, hint, refused, within
from tests.deployments.http.fields.shared import (
    ADD,
    CONVERSATION,
    HELLO,
    SAMPLING,
    SCHEMA,
    rich_server,
)

_PENALTY = {"repeat_penalty": 1.5}
OPTIONS: Rows = {
    **{name: SAMPLING[name] for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")},
    **{name: SAMPLING[name] for name in ("stop", "presence_penalty", "frequency_penalty")},
    "num_predict": effect(3),
    "seed": effect(3),
    "repeat_penalty": effect(1.5),
    "repeat_last_n": effect(0, _PENALTY),
    "tfs_z": refused(0.5),
    "mirostat": refused(1),
    "mirostat_tau": hint(5.0),
    "mirostat_eta": hint(0.1),
    "penalize_newline": hint(False),
    "num_ctx": effect(200),
    "num_keep": hint(3),
    "num_batch": hint(3),
    "num_gpu": hint(3),
    "main_gpu": hint(3),
    "num_thread": hint(3),
    "numa": hint(True),
    "low_vram": hint(True),
    "f16_kv": hint(True),
    "vocab_only": hint(True),
    "use_mmap": hint(True),
    "use_mlock": hint(True),
    "logits_all": hint(True),
    "embedding_only": hint(True),
}
SHARED: Rows = {
    "model": refused("other"),
    "stream": effect(False),
    "format": effect("json"),
    **within("options", OPTIONS),
    "think": effect(False),
    "keep_alive": hint("5m"),
    "logprobs": effect(True),
    "top_logprobs": effect(2, {"logprobs": True}),
    "shift": refused(True),
}
_CALLING = {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}]}
_CALL = "messages[0].tool_calls[0]."
LONG = "a" * 2000
CHAT: Rows = {
    **SHARED,
    "truncate": refused(False, {"messages[0].content": LONG}, named="context length"),
    "messages[0].role": effect("system"),
    "messages[0].content": effect("Ho"),
    "messages[0].thinking": effect("Hm.", {"messages[0].role": "assistant"}),
    "messages[0].images": refused(["a"]),
    f"{_CALL}id": effect("1", _CALLING),
    f"{_CALL}type": hint("function", _CALLING),
    f"{_CALL}function.name": effect("sub", _CALLING),
    f"{_CALL}function.arguments": effect({"a": 1}, _CALLING),
    f"{_CALL}function.index": hint(0, _CALLING),
    "messages[0].tool_name": effect("add", {"messages[0].role": "tool"}),
    "messages[0].tool_call_id": effect("1", {"messages[0].role": "tool"}),
    "tools": effect([ADD]),
}
GENERATE: Rows = {
    **SHARED,
    "truncate": refused(False, {"prompt": LONG}, named="context length"),
    "prompt": effect("abc"),
    "system": effect("Be brief."),
    "raw": effect(True),
    "images": refused(["a"]),
    "suffix": effect("b"),
    "template": refused("{{ .Prompt }}"),
    "context": effect([65]),
}
PULL: Rows = {
    "model": refused("other", named="other"),
    "name": refused("other", {"model": None}, named="other"),
    "stream": effect(False),
    "insecure": hint(True),
}
SHOW: Rows = {
    "model": refused("other"),
    "name": refused("other", {"model": None}, named="other"),
    "verbose": hint(True),
}

LLAMA: Rows = {
    **SAMPLING,
    "model": refused("other"),
    "n_predict": effect(3),
    "max_tokens": effect(3),
    "repeat_penalty": effect(1.5),
    "repeat_last_n": effect(0, _PENALTY),
    "seed": effect(3),
    "logit_bias": effect([[7, 1.0]]),
    "n_cmpl": effect(2),
    "n_probs": effect(2),
    "n_indent": effect(2, says="a\n b\nc"),
    "t_max_predict_ms": refused(5, {"stream": True}),
    **dict.fromkeys(("use_beam_search", "early_stopping"), refused(True)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), refused(2)),
    **dict.fromkeys(("length_penalty", "diversity_penalty"), refused(0.5)),
    "samplers": effect([], {"temperature": 0.5}),
    "grammar": effect('root ::= "a"'),
    "json_schema": effect(SCHEMA),
    "stream": effect(True),
    "cache_prompt": effect(False),
    "return_tokens": effect(True),
    "timings_per_token": effect(True, {"stream": True}),
    "response_fields": effect(["content"]),
    "dynatemp_range": refused(0.5),
    "dry_multiplier": refused(0.5),
    "xtc_probability": refused(0.5),
    "top_n_sigma": refused(1.0),
    "adaptive_target": refused(0.5),
    "mirostat": refused(1),
    "min_keep": refused(2),
    "post_sampling_probs": refused(True),
    "return_progress": refused(True),
    "grammar_lazy": refused(True),
    "grammar_triggers": refused(["a"]),
    "preserved_tokens": refused(["a"]),
    "lora": refused([{"id": 0}]),
    "dynatemp_exponent": hint(1.0),
    "dry_base": hint(1.0),
    "dry_allowed_length": hint(2),
    "dry_penalty_last_n": hint(2),
    "dry_sequence_breakers": hint(["a"]),
    "xtc_threshold": hint(0.5),
    "adaptive_decay": hint(0.5),
    "mirostat_tau": hint(5.0),
    "mirostat_eta": hint(0.1),
    "t_max_prompt_ms": hint(3),
    "id_slot": hint(0),
    "n_keep": hint(3),
    "n_discard": hint(3),
    "n_cache_reuse": hint(3),
    "sse_ping_interval": hint(3),
    "backend_sampling": hint(True),
}
COMPLETION: Rows = {**LLAMA, "prompt": effect("abc")}
INFILL: Rows = {
    **LLAMA,
    "input_prefix": effect("b"),
    "input_suffix": effect("b"),
    "input_extra[0].text": effect("b", {"input_extra": [{"text": "a"}]}),
    "input_extra[0].filename": effect("b", {"input_extra": [{"text": "a"}]}),
    "prompt": effect("b"),
}
TOKENIZE: Rows = {
    "content": effect("abc"),
    "add_special": effect(True),
    "parse_special": refused(False, {"content": "a</s>"}),
    "with_pieces": effect(True),
    "model": refused("other"),
}
APPLY: Rows = {**PROMPT, **CONVERSATION, "model": refused("other")}

APIS = {
    "ollama chat": Api(OllamaChatBody, "/api/chat", {"messages": HELLO}, CHAT, rich_server()),
    "ollama generate": Api(
        OllamaGenerateBody, "/api/generate", {"prompt": "ab"}, GENERATE, rich_server()
    ),
    "ollama pull": Api(PullBody, "/api/pull", {"model": "tiny"}, PULL, rich_server()),
    "ollama show": Api(ShowBody, "/api/show", {"model": "tiny"}, SHOW, rich_server()),
    "llama.cpp": Api(
        LlamaCompletionBody, "/completion", {"prompt": "ab"}, COMPLETION, rich_server()
    ),
    "infill": Api(
        InfillBody, "/infill", {"input_prefix": "a", "input_suffix": "c"}, INFILL, rich_server()
    ),
    "llama.cpp tokenize": Api(
        LlamaTokenizeBody,
        "/tokenize",
        {"content": "ab"},
        TOKENIZE,
        rich_server(),
        "/tokenize with content",
    ),
    "apply template": Api(
        ApplyTemplateBody, "/apply-template", {"messages": HELLO}, APPLY, rich_server()
    ),
}
