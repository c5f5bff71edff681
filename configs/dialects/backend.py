"""The backend server's JSON: an optimisation document and a pipeline document.

Both may be in one mapping, or under `optimization` and `pipeline`. Nested keys are named by path:
`backend.extra_params.context_length`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects import lora_entries, speculation
from remora.configs.dialects.catalogue import catalogue
from remora.configs.dialects.dialect import Dialect, Flat, dotted
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
)
from remora.configs.dialects.shared_rules import (
    COMPILE,
    REASONING,
    ROUNDED,
    TOOLS,
    memory_share,
    only_with,
)
from remora.configs.validation_messages import KeyPath

_DOCUMENTS = ("optimization", "optimisation", "pipeline")
_VERSIONS = ("v3", "v4")
_EXTRA = "backend.extra_params."


def flatten(data: Mapping[str, Any]) -> Flat:
    """Return dotted name -> (path, value); objects without known keys are not flattened."""
    found: dict[str, tuple[KeyPath, Any]] = {}
    for key, value in data.items():
        is_document = key in _DOCUMENTS and isinstance(value, Mapping)
        parts = (
            dotted("backend", value, (key,)) if is_document else dotted("backend", {key: value}, ())
        )
        found |= dict(parts)
    return found


def _of_version(value: str, given: Mapping[str, Any]) -> Effect:
    """Check parameters and values against those of v3 or v4."""
    if value == "auto":
        value = _resolve(given)
    for name, parameter in catalogue("backend").items():
        if name not in given:
            continue
        if value not in (parameter.backends or _VERSIONS):
            raise Refusal(f"{name} is not a parameter of {value}; v4 has it")
        choices = (parameter.choices_by_backend or {}).get(value)
        if choices is not None and given[name] not in choices:
            raise Refusal(f"{name} = {given[name]}: {value} has {', '.join(choices)}")
    return Effect({}, f"accepts the options of {value}; the engine is remora's")


def _resolve(given: Mapping[str, Any]) -> str:
    """Return v3 if any value exists only there, else v4."""
    for name, parameter in catalogue("backend").items():
        by = parameter.choices_by_backend
        if by is not None and name in given and given[name] not in by["v4"]:
            return "v3"
    return "v4"


def _only(*allowed: Any, otherwise: str, why: str) -> Means:
    """Return the rule of a parameter of which remora has only the values `allowed`."""

    def read(value: Any, given: Mapping[str, Any]) -> Harmless:
        if value not in allowed:
            raise Refusal(otherwise)
        return Harmless(why)

    return Means(keys=(), reads=read, why=why)


def _of_extra(value: Any, given: Mapping[str, Any]) -> Harmless:
    if value:
        raise Refusal("expected an object of options")
    return Harmless("no options are given")


_LLM_ONLY = _only("llm", otherwise="not yet: other kinds than llm", why="llm; others are refused")


def _same_type(value: str, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    if value != given.get("model_type", "llm"):
        raise Refusal(f"model_type is {given.get('model_type', 'llm')}; make them agree")
    return _LLM_ONLY.reads(value, given)


def _no_options(value: Any, given: Mapping[str, Any]) -> Harmless:
    if value:
        raise Refusal(f"unknown options {', '.join(map(str, value))}: the cache has none")
    return Harmless("the cache has no options")


def _of_inputs(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    if not value:
        return Harmless("the built-in inputs are used")
    if not isinstance(value, list) or not all(isinstance(each, str | list) for each in value):
        raise Refusal("expected a list of prompts: texts, or lists of token ids")
    return {"warmup.inputs": value}


def _of_mode(value: Any, given: Mapping[str, Any]) -> Settings:
    if value == "embedding":
        return {"model.task": "embed"}
    if value not in ("chat", "completion"):
        raise Refusal("not offered; supported: chat, completion, embedding")
    return {"api.generation": value}


def _to_mode(settings: Settings) -> Any:
    if settings.get("model.task") == "embed":
        return "embedding"
    generation = settings.get("api.generation")
    return generation if generation in ("chat", "completion") else UNSAID


_REPO = "lora.repo"
_STORES = {"s3": "s3", "gs": "gs", "gcs": "gs"}  # lora_repo.type -> scheme of URLs
_CREDENTIALS = "directories need no credentials; those of stores come from the environment (AWS_*)"


def _of_repo_path(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    if not value:
        return Harmless("no repository is given")
    kind = given.get("lora_repo.type")
    scheme = _STORES.get(kind or "")
    if value.startswith("env:") or (scheme is None and not kind):
        return Effect({_REPO: value})
    found = value.partition("://")[0] if "://" in value else None
    if found not in (None, scheme):
        raise Refusal(f"lora_repo.type is {kind}; make them agree")
    return Effect({_REPO: value if scheme is None or found else f"{scheme}://{value.lstrip('/')}"})


def _of_repo_type(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    if value in ("", "local"):
        return Harmless("adapters are read from a directory")
    if value not in _STORES:
        raise Refusal(f"supported: local, {', '.join(_STORES)}; hf:// URLs go into lora.roots")
    path = given.get("lora_repo.path")
    if not path:
        raise Refusal("needs lora_repo.path, the bucket and folder of the adapters")
    return _of_repo_path(path, given)


def _to_repo_type(settings: Settings) -> Any:
    scheme, separator, _ = str(settings.get(_REPO, "")).partition("://")
    return scheme if separator and scheme in _STORES else UNSAID


RULES: Mapping[str, Rule] = {
    "backend.name": Means(
        keys=(),
        reads=_of_version,
        how="selects which parameters and values are accepted; the engine is remora's",
    ),
    "backend.version": _only(
        "latest",
        otherwise="remora has one version; give latest, or leave it out",
        why="latest; others are refused",
    ),
    "backend.extra_params": Means(keys=(), reads=_of_extra, why="see its parameters below"),
    f"{_EXTRA}context_length": Sets(key="model.context_length"),
    f"{_EXTRA}max_running_requests": Sets(key="engine.max_running_requests"),
    f"{_EXTRA}max_total_tokens": Sets(key="engine.kv_tokens"),
    f"{_EXTRA}chunked_prefill_size": Sets(key="engine.prefill_chunk_tokens"),
    f"{_EXTRA}max_prefill_tokens": Sets(key="engine.max_prefill_tokens"),
    f"{_EXTRA}reasoning_parser": REASONING,
    f"{_EXTRA}tool_call_parser": TOOLS,
    f"{_EXTRA}gpu_memory_utilization": memory_share(f"{_EXTRA}max_total_tokens"),
    "mode": Means(
        keys=("api.generation", "model.task"),
        reads=_of_mode,
        writes=_to_mode,
        how="chat and completion turn the other's routes off; embedding serves /v1/embeddings",
    ),
    f"{_EXTRA}cuda_graph_max_bs": Sets(key="engine.graph_max_rows"),
    f"{_EXTRA}enable_torch_compile": COMPILE,
    f"{_EXTRA}torch_compile_max_bs": only_with(
        f"{_EXTRA}enable_torch_compile", "engine.compile_max_rows"
    ),
    "warmups.enabled": Sets(key="warmup.enabled"),
    "warmups.iterations": Sets(key="warmup.iterations"),
    "warmups.sample_input_data": Means(
        keys=("warmup.inputs",),
        reads=_of_inputs,
        writes=lambda settings: settings.get("warmup.inputs") or UNSAID,
    ),
    "lora_repo.type": Means(keys=(_REPO,), reads=_of_repo_type, writes=_to_repo_type),
    "lora_repo.secret.type": NoEffect(
        _CREDENTIALS,
        only=("", "none"),
        otherwise=_CREDENTIALS,
    ),
    "lora_repo.ownership": NoEffect(
        _CREDENTIALS,
        only=("", "public", "private"),
        otherwise="supported: public, private",
    ),
    "model_type": _LLM_ONLY,
    "optimisations.model_type": Means(
        keys=(), reads=_same_type, why="the same as model_type; others are refused"
    ),
    "quantization": Sets(
        key="model.quantization",
        table={"float16": "none", "w4": "int4_pure", "float8": "fp8"},
        strict=True,
        hows={"w4": ROUNDED["int4_pure"], "float8": ROUNDED["fp8"]},
    ),
    "optimisations.attention_caching.enabled": Sets(key="engine.prefix_cache"),
    "optimisations.attention_caching.type": _only(
        "auto",
        "radix",
        otherwise="the only kind is radix, a tree of pages; set it to radix or auto",
        why="the only kind is a radix tree of pages (auto, radix); others are refused",
    ),
    "optimisations.attention_caching.extra_params": Means(
        keys=(), reads=_no_options, why="there are none; others are refused"
    ),
    **speculation.BACKEND,
    "tensor_parallel_size": Sets(key="parallel.tp_size"),
    "type": _LLM_ONLY,
    "loras": Means(
        keys=("lora.adapters",),
        reads=lora_entries.of_objects,
        writes=lora_entries.to_objects,
    ),
    "load_lora_dynamic": Sets(key="lora.dynamic"),
    "lora_repo.path": Means(keys=(_REPO,), reads=_of_repo_path),
}

BACKEND = Dialect(system="backend", title="the backend config", rules=RULES, flatten=flatten)
