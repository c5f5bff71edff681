"""Rules for vLLM's speculation: --speculative-config and its short forms --spec-*.

All four describe one configuration, so each is read with the others. Drafts are counted as here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects.rules import UNSAID, Effect, Harmless, Means, Refusal, Settings, never

_CONFIG = "--speculative-config"
_SHORT = {"--spec-method": "method", "--spec-model": "model"}
_TOKENS = {"--spec-tokens": "num_speculative_tokens"}
_METHOD, _MODEL, _MOST = (
    "speculation.method",
    "speculation.draft_model",
    "speculation.max_drafts",
)
_SHORTEST, _LONGEST = "speculation.shortest_suffix", "speculation.longest_suffix"
_SHARED = "speculation.shared_index_memory"
_METHODS = {
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "ngram",
    "draft_model": "draft",
    "eagle": "eagle",
    "eagle3": "eagle",
    "mtp": "mtp",
    "deepseek_mtp": "mtp",
    "mimo_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
}
_SUFFIX_MEMORY = 64 * 2**20  # of texts of earlier requests
_ADAPTS = "the draft length adapts to acceptance, see speculation.adaptive"
# Options that change nothing here: how the draft model runs, and memory.
_IGNORED = {
    "draft_tensor_parallel_size",
    "tensor_parallel_size",
    "enforce_eager",
    "max_model_len",
    "attention_backend",
    "moe_backend",
    "disable_padded_drafter_batch",
    "use_local_argmax_reduction",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "draft_sample_method",
}
_READ = {"method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
_STANDARD = ("standard", "strict", "probabilistic")


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of all four arguments. Raises Refusal."""
    config = given.get(_CONFIG) or {}
    if not isinstance(config, Mapping):
        raise Refusal("expected an object of options, such as method and num_speculative_tokens")
    options = {name: value for name, value in config.items() if value is not None}
    for argument, name in (_SHORT | _TOKENS).items():
        if argument in given:
            options.setdefault(name, given[argument])
    if options.get("rejection_sample_method", "standard") not in _STANDARD:
        raise Refusal("rejection_sample_method: drafts are accepted exactly, as with standard")
    unknown = options.keys() - _READ - _IGNORED - {"rejection_sample_method"}
    if unknown:
        raise Refusal(f"{sorted(unknown)[0]}: not offered; supported: {', '.join(sorted(_READ))}")
    return options


def _method(options: Mapping[str, Any]) -> str:
    """Return remora's method; as in vLLM, a model's name may say what it is. Raises Refusal."""
    name, model = options.get("method"), str(options.get("model") or "")
    if name is None:
        if not model:
            raise Refusal("name a method or a model")
        lower = model.lower()
        known = [each for each in ("eagle3", "eagle", "mtp") if each in lower]
        name = "ngram" if model == "ngram" else (*known, "draft_model")[0]
    if name not in _METHODS:
        raise Refusal(f"not offered: the method {name}; supported: {', '.join(_METHODS)}")
    if _METHODS[name] in ("draft", "eagle") and not model:
        raise Refusal(f"{name} needs model, the draft model or the head")
    return str(name)


def _part(given: Mapping[str, Any], *names: str) -> Effect | Harmless:
    """Return the settings that follow from some of the options."""
    options = _options(given)
    name = _method(options)
    method, settings = _METHODS[name], dict[str, Any]()
    if "method" in names:
        settings[_METHOD] = method
        if name == "suffix":
            settings[_SHARED] = _SUFFIX_MEMORY
        elif method == "ngram":
            longest = options.get("prompt_lookup_max", options.get("prompt_lookup_min", 5))
            settings[_LONGEST] = longest
            settings[_SHORTEST] = options.get("prompt_lookup_min", longest)
    if "model" in names and method in ("draft", "eagle"):
        settings[_MODEL] = options["model"]
    if "num_speculative_tokens" in names and "num_speculative_tokens" in options:
        settings[_MOST] = options["num_speculative_tokens"]
    if not settings:
        return Harmless(f"{name} needs none: the layer is in the model's own checkpoint")
    return Effect(settings, _ADAPTS)


def _of_config(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
    if not value:
        return Harmless("there are no drafts")
    return _part(given, "method", "model", "num_speculative_tokens")


def _short(name: str, *keys: str) -> Means:
    """Return the rule of a short form of an option."""

    def read(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        if not ("--spec-method" in given or _CONFIG in given):
            return _part(given, name, *(["method"] if name == "model" else []))
        try:
            return _part(given, name)
        except Refusal:
            if name == "method":
                raise
            return Harmless("the method is refused")  # reported once

    return Means(keys=keys, reads=read, writes=never, how=_ADAPTS)


_ALL = (_METHOD, _MODEL, _MOST, _SHORTEST, _LONGEST, _SHARED)
_NAMES = {"ngram": "ngram", "draft": "draft_model", "eagle": "eagle", "mtp": "mtp"}


def _to_config(settings: Settings) -> Any:
    name = _NAMES.get(settings.get(_METHOD, ""))
    if name is None:
        return UNSAID
    found = {
        "method": name,
        "model": settings.get(_MODEL),
        "num_speculative_tokens": settings.get(_MOST),
    }
    if name == "ngram":
        found["prompt_lookup_max"] = settings.get(_LONGEST)
        found["prompt_lookup_min"] = settings.get(_SHORTEST)
    return {key: value for key, value in found.items() if value is not None}


RULES: Mapping[str, Means] = {
    _CONFIG: Means(
        keys=_ALL,
        reads=_of_config,
        writes=_to_config,
        how=f"chains, no trees; suffix is a lookup in earlier texts; {_ADAPTS}",
    ),
    "--spec-method": _short("method", _METHOD, _SHORTEST, _LONGEST, _SHARED),
    "--spec-model": _short("model", _MODEL, _METHOD, _SHORTEST, _LONGEST),
    "--spec-tokens": _short("num_speculative_tokens", _MOST),
}
