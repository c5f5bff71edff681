"""LightLLM's API server arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from remora.configs.dialects import speculation
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.rules import (
    UNSAID,
    Effect,
    Harmless,
    Means,
    NoEffect,
    Refusal,
    Rule,
    Sets,
    Settings,
    never,
)
from remora.configs.dialects.shared_rules import (
    DTYPE,
    REASONING,
    ROUNDED,
    TOKENIZER_MODE,
    TOOLS,
    TRUST_CODE,
    WEIGHT_ONLY,
    memory_share,
    no_graphs,
    only_with,
)
from remora.configs.errors import ConfigError
from remora.configs.positions import parse_yaml, read_text

_FIRST_TOKENS = "FIRST_ALLOWED_TOKENS"
_MODES = {
    "triton_flashdecoding": "decode attention always splits keys by length",
    "triton_gqa_attention": "attention always shares KV reads within a group of heads",
    "triton_gqa_flashdecoding": "attention always splits keys and shares KV reads",
}
_KV_MODES = {
    "triton_int8kv": "a scale for each token and head",
    "ppl_int8kv": "a scale for each token and head, where PPL's kernels have one for 8 elements",
}


_GROUPS = (32, 64, 128, 256)
_QUANTISATION = {
    "none": "none",
    **dict.fromkeys(("ao-int8wo", "ao-w8a16", "ao-w8a8", "vllm-w8a8"), "int8"),
    **dict.fromkeys((f"ao-int4wo-{group}" for group in _GROUPS), "int4_pure"),
    **dict.fromkeys((f"ao-w4a16-{group}" for group in _GROUPS), "int4_pure"),
    "ppl-w4a16-128": "int4_pure",
    "ao-fp8w8a16": "fp8",
    "vllm-fp8w8a8": "fp8",
}
_STORED = ("vllm-fp8w8a8-b128", "triton-fp8w8a8-block128")


def _of_quantisation(value: Any, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    if value in _STORED:
        raise Refusal(
            "a checkpoint in float8 blocks is recognised: leave it out; others are not rounded to "
            "blocks, and vllm-fp8w8a8 rounds to float8 per output"
        )
    if value in _QUANTISATION:
        wanted = _QUANTISATION[value]
        return Effect({"model.quantization": wanted}, ROUNDED[wanted])
    raise Refusal(f"not offered: weights of 6 bits; use one of {', '.join(_QUANTISATION)}")


_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "kv_proj": ("k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_moe": ("gate_proj", "up_proj", "down_proj"),
    **{part: (part,) for part in ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")},
}
_HELD = {"none": "none", "int8": "int8", "int4_pure": "int4"}
_MIX_KEYS = {"name", "layer_nums", "quant_type"}


def _of_mixed_quantisation(value: str, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    """Read LightLLM's file: `quant_type`, and `mix_bits`, a list of exceptions."""
    if given.get("--quant_type", "none") != "none":
        raise Refusal("the file names the usual quant_type: leave --quant_type out")
    try:
        data = parse_yaml(read_text(value), value).data
    except ConfigError as error:
        raise Refusal(str(error)) from None
    if not isinstance(data, Mapping) or not data.keys() <= {"quant_type", "mix_bits"}:
        raise Refusal(f"{value}: expected the keys quant_type and mix_bits")
    mixed = data.get("mix_bits") or []
    if not isinstance(mixed, list):
        raise Refusal(f"{value}: mix_bits: expected a list")
    overrides = [_override(f"{value}: mix_bits[{at}]", each) for at, each in enumerate(mixed)]
    usual = _of_quantisation(data.get("quant_type", "none"), given)
    assert isinstance(usual, Effect), "of a known quant_type"
    settings = {**usual.settings, "model.quantization_overrides": overrides}
    return Effect(settings, WEIGHT_ONLY)


def _override(where: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping) or not found.keys() <= _MIX_KEYS or "name" not in found:
        raise Refusal(f"{where}: expected {', '.join(sorted(_MIX_KEYS))}")
    if (name := found["name"]) not in _PARTS:
        raise Refusal(f"{where}: {name} is not known; expected one of {', '.join(_PARTS)}")
    kind = found.get("quant_type", "none")
    if (held := _HELD.get(_QUANTISATION.get(kind, ""))) is None:
        offered = [each for each, ours in _QUANTISATION.items() if ours in _HELD]
        raise Refusal(f"{where}: {kind} is not offered for parts; use {', '.join(offered)}")
    override: dict[str, Any] = {"parts": list(_PARTS[name]), "format": held}
    if (layers := found.get("layer_nums")) is not None:
        override["layers"] = layers
    return override


def _to_quantisation(settings: Settings) -> Any:
    known = {
        "int8": "ao-int8wo",
        "int4_pure": "ao-int4wo-32",
        "fp8": "vllm-fp8w8a8",
        "none": "none",
    }
    return known.get(settings.get("model.quantization", ""), UNSAID)


def _of_modes(value: list[str], given: Mapping[str, Any]) -> Effect | Harmless:
    known = (*_MODES, *_KV_MODES)
    for mode in value:
        if mode == "triton_fp8kv":
            raise Refusal(f"{mode}: not offered: 8-bit latents; supported: {', '.join(known)}")
        if mode not in known:
            raise Refusal(f"{mode}: not offered: PPL's kernels; supported: {', '.join(known)}")
    kv_modes = [mode for mode in value if mode in _KV_MODES]
    if kv_modes:
        return Effect({"engine.kv_dtype": "int8"}, "; ".join(_KV_MODES[mode] for mode in kv_modes))
    return Harmless("; ".join(_MODES[mode] for mode in value) or "kernels are chosen automatically")


def _to_modes(settings: Settings) -> Any:
    return ["triton_int8kv"] if settings.get("engine.kv_dtype") == "int8" else UNSAID


def _of_grouping(value: list[str], given: Mapping[str, Any]) -> Settings:
    pairs = [text.partition("=") for text in value]
    if not all(name and equals and label for name, equals, label in pairs):
        raise Refusal("expected name=value")
    return {"metrics.push_labels": {name: label for name, _, label in pairs}}


def _to_grouping(settings: Settings) -> Any:
    labels = settings.get("metrics.push_labels")
    return [f"{name}={label}" for name, label in labels.items()] if labels else UNSAID


def _of_first_tokens(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    if not value:
        return Harmless("outputs may begin with any token")
    text = os.environ.get(_FIRST_TOKENS, "")
    try:
        return {"grammar.first_token_ids": [int(part) for part in text.split(",")]}
    except ValueError:
        raise Refusal(
            f"the variable {_FIRST_TOKENS} is {text!r}; set it to token ids, such as 1,2"
        ) from None


def _to_expected(settings: Settings) -> Any:
    if not settings.get("engine.full_reserve_usage"):
        return UNSAID
    return settings.get("engine.expected_output_tokens", UNSAID)


def _of_aggressive(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    if not value:
        return Harmless("every step admits waiting requests")
    return {"engine.admission_interval_steps": given.get("--router_max_wait_tokens", 6)}


def _of_chunk(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    if given.get("--disable_chunked_prefill"):
        return Harmless("it has no effect with --disable_chunked_prefill")
    return {"engine.prefill_chunk_tokens": value}


def _of_stats(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    if given.get("--disable_log_stats"):
        return Harmless("it has no effect with --disable_log_stats")
    return {"metrics.log_stats_period_s": float(value)}


def _of_no_stats(value: bool, given: Mapping[str, Any]) -> Settings:
    return {"metrics.log_stats_period_s": None if value else given.get("--log_stats_interval", 10)}


def _to_no_stats(settings: Settings) -> Any:
    key = "metrics.log_stats_period_s"
    return True if key in settings and settings[key] is None else UNSAID


def _of_fa3(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    return {"engine.attention_backend": "fa3"} if value else Harmless("Triton's kernels attend")


def _of_flashinfer(value: bool, given: Mapping[str, Any]) -> Effect | Harmless:
    if not value:
        return Harmless("Triton's kernels attend")
    if given.get("--enable_fa3"):
        raise Refusal("--enable_fa3 selects another backend; keep one of the two")
    return Effect(
        {"engine.attention_backend": "flashinfer"}, "prefill and decode use the same backend"
    )


def _writes_backend(name: str) -> Callable[[Settings], Any]:
    return lambda settings: settings.get("engine.attention_backend") == name or UNSAID


_FLASHINFER = Means(
    keys=("engine.attention_backend",),
    reads=_of_flashinfer,
    writes=_writes_backend("flashinfer"),
    how="prefill and decode use the same backend",
)

RULES: Mapping[str, Rule] = {
    **speculation.LIGHTLLM,
    "--host": Sets(key="http.host"),
    "--port": Sets(key="http.port"),
    "--model_dir": Sets(key="model.path"),
    "--model_name": Sets(key="model.served_name"),
    "--data_type": DTYPE,
    "--trust_remote_code": TRUST_CODE,
    "--chat_template": Sets(key="model.chat_template"),
    "--load_way": NoEffect(
        "checkpoints are in Hugging Face layout",
        only=("HF",),
        otherwise="not offered: DeepSpeed checkpoints; convert them to Hugging Face layout",
    ),
    "--max_total_token_num": Sets(key="engine.kv_tokens"),
    "--max_req_total_len": Sets(key="model.context_length"),
    "--running_max_req_size": Sets(key="engine.max_running_requests"),
    "--batch_max_tokens": Sets(key="engine.max_prefill_tokens"),
    "--router_token_ratio": Sets(key="engine.full_reserve_usage"),
    "--router_max_new_token_len": only_with(
        "--router_token_ratio", "engine.expected_output_tokens", _to_expected
    ),
    "--router_max_wait_tokens": Sets(
        key="engine.admission_interval_steps", how="with or without --disable_aggressive_schedule"
    ),
    "--disable_aggressive_schedule": Means(
        keys=("engine.admission_interval_steps",),
        reads=_of_aggressive,
        writes=lambda settings: settings.get("engine.admission_interval_steps", 1) > 1 or UNSAID,
    ),
    "--schedule_time_interval": Sets(
        key="engine.admission_interval_s", how="between admissions; steps do not wait"
    ),
    "--mem_fraction": memory_share("--max_total_token_num"),
    "--long_truncation_mode": Sets(key="api.prompt_truncation"),
    "--tokenizer_mode": TOKENIZER_MODE,
    "--eos_id": Sets(key="model.eos_token_ids"),
    "--return_all_prompt_logprobs": Sets(key="api.prompt_logprobs"),
    "--first_token_constraint_mode": Means(
        keys=("grammar.first_token_ids",),
        reads=_of_first_tokens,
        writes=never,  # the ids are in the environment
    ),
    "--nccl_port": Sets(key="parallel.rendezvous_port", how="for the ranks of one replica"),
    "--metric_gateway": Means(
        keys=("metrics.push_url",),
        reads=lambda value, given: {
            "metrics.push_url": value if "://" in value else f"http://{value}"
        },
    ),
    "--job_name": Sets(key="metrics.push_job"),
    "--push_interval": Sets(key="metrics.push_period_s"),
    "--grouping_key": Means(keys=("metrics.push_labels",), reads=_of_grouping, writes=_to_grouping),
    "--enable_monitor_auth": Sets(
        key="metrics.push_auth",
        table={True: "env:REMORA_PUSH_AUTH"},
        unset={False: "no credentials are sent"},
        how="USER:PASSWORD or a bearer token from the variable REMORA_PUSH_AUTH",
    ),
    "--disable_log_stats": Means(
        keys=("metrics.log_stats_period_s",), reads=_of_no_stats, writes=_to_no_stats
    ),
    "--log_stats_interval": Means(keys=("metrics.log_stats_period_s",), reads=_of_stats),
    "--chunked_prefill_size": Means(keys=("engine.prefill_chunk_tokens",), reads=_of_chunk),
    "--use_reward_model": Sets(
        key="model.task",
        table={True: "reward"},
        strict=True,
        unset={False: "the checkpoint decides"},
        how="/classify, /pooling and /encode return the score",
    ),
    "--disable_chunked_prefill": Sets(key="engine.chunked_prefill", invert=True),
    "--disable_dynamic_prompt_cache": Sets(key="engine.prefix_cache", invert=True),
    "--diverse_mode": Sets(key="engine.share_prompts"),
    "--tp": Sets(key="parallel.tp_size"),
    "--dp": Sets(key="parallel.num_replicas", how="each is a Ray Serve replica, for any model"),
    "--mode": Means(
        keys=("engine.kv_dtype",),
        reads=_of_modes,
        writes=_to_modes,
        how="int8kv: a scale for each token and head; the others change nothing here",
    ),
    "--quant_type": Means(
        keys=("model.quantization",),
        reads=_of_quantisation,
        writes=_to_quantisation,
        how=WEIGHT_ONLY,
    ),
    "--quant_cfg": Means(
        keys=("model.quantization", "model.quantization_overrides"),
        reads=_of_mixed_quantisation,
        writes=never,
        how=WEIGHT_ONLY,
    ),
    "--use_tgi_api": Sets(
        key="api.generate_dialect", table={True: "tgi", False: "lightllm"}, strict=True
    ),
    "--tool_call_parser": TOOLS,
    "--reasoning_parser": REASONING,
    "--output_constraint_mode": Sets(key="grammar.backend"),
    "--token_healing_mode": Sets(key="grammar.token_healing"),
    "--enable_fa3": Means(
        keys=("engine.attention_backend",), reads=_of_fa3, writes=_writes_backend("fa3")
    ),
    "--enable_flashinfer_prefill": _FLASHINFER,
    "--enable_flashinfer_decode": _FLASHINFER,
    "--disable_cudagraph": no_graphs("--graph_max_batch_size"),
    "--graph_max_batch_size": Sets(key="engine.graph_max_rows"),
    "--graph_split_batch_size": Means(
        keys=("engine.graph_split", "engine.graph_fine"),
        reads=lambda value, given: {"engine.graph_split": value, "engine.graph_fine": 1},
        writes=lambda settings: (
            settings.get("engine.graph_split", UNSAID)
            if settings.get("engine.graph_fine") == 1
            else UNSAID
        ),
    ),
    "--graph_max_len_in_batch": Sets(
        key="engine.graph_max_tokens", unset={0: "sequences of any length use graphs"}
    ),
    "--graph_grow_step_size": Sets(key="engine.graph_step"),
}

LIGHTLLM = Dialect(
    system="lightllm",
    title="LightLLM",
    rules=RULES,
    defaults={"http.host": "127.0.0.1", "http.port": 8000, "api.generate_dialect": "lightllm"},
)
