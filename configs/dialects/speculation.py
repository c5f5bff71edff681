"""Rules of the parameters of speculative decoding, for each server.

The servers count drafts differently: SGLang and the backend count the rows of a verifying step,
which are the drafts and one more; RTP-LLM and LightLLM count drafts. remora counts drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from remora.configs.dialects.rules import (
    UNSAID,
    Effect,
    Harmless,
    Means,
    NoEffect,
    Refusal,
    Refused,
    Rule,
    Settings,
)

_METHOD, _MOST = "speculation.method", "speculation.max_drafts"
_SHORTEST, _LONGEST = "speculation.shortest_suffix", "speculation.longest_suffix"
_ADAPTS = "the draft length adapts to acceptance, see speculation.adaptive"
_ANY_MODEL = "speculation.method ngram works with any model"
_HEADS = "not yet: drafts by trained heads (EAGLE, MTP layers)"
_MODELS = "not yet: drafts by a separate model"
_TREES = "not yet: trees of drafts; 1 works, a chain"
_FEW = "a step verifies one row more than it has drafts: at least 2"


def _writes_ngram(name: str) -> Callable[[Settings], Any]:
    return lambda settings: name if settings.get(_METHOD) == "ngram" else UNSAID


def _writes_rows(settings: Settings) -> Any:
    if settings.get(_METHOD) != "ngram" or _MOST not in settings:
        return UNSAID
    return settings[_MOST] + 1


def _drafts(rows: int) -> int:
    if rows < 2:
        raise Refusal(_FEW)
    return rows - 1


# SGLang

_SWITCH = "--speculative-algorithm"
_ROWS = "--speculative-num-draft-tokens"
_MIN = "--speculative-ngram-min-match-window-size"
_MAX = "--speculative-ngram-max-match-window-size"


def _of_algorithm(value: str, given: Mapping[str, Any]) -> Settings:
    """Set what NGRAM means with SGLang's own defaults."""
    if value != "NGRAM":
        why = _MODELS if value == "STANDALONE" else _HEADS
        raise Refusal(f"{why}; NGRAM works with any model")
    longest = given.get(_MAX, 12)
    own = {_METHOD: "ngram", _SHORTEST: given.get(_MIN, 1), _LONGEST: longest}
    return own if _ROWS in given else {**own, _MOST: max(1, longest - 1)}


def _ngram_only(key: str, writes: Callable[[Settings], Any], rows: bool = False) -> Means:
    """Return the rule of a parameter that counts only with NGRAM."""

    def read(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
        if given.get(_SWITCH) != "NGRAM":
            return Harmless(f"it has no effect without {_SWITCH} NGRAM")
        if rows:
            return Effect({key: _drafts(value)}, _ADAPTS)
        if key == _LONGEST and _ROWS not in given:
            _drafts(value)  # the default of --speculative-num-draft-tokens
        return Effect({key: value})

    return Means(keys=(key,), reads=read, writes=writes)


def _writes_suffix(key: str) -> Callable[[Settings], Any]:
    return lambda settings: (
        settings.get(key, UNSAID) if settings.get(_METHOD) == "ngram" else UNSAID
    )


_LOSSY = NoEffect(
    "a draft is accepted if it is the token that would have been sampled",
    only=(1.0,),
    otherwise="not offered: accepting other drafts than the sampled tokens; 1.0 works",
)

SGLANG: Mapping[str, Rule] = {
    _SWITCH: Means(
        keys=(_METHOD, _SHORTEST, _LONGEST, _MOST),
        reads=_of_algorithm,
        writes=_writes_ngram("NGRAM"),
        how=f"chains from each request's own text, no trees; {_ADAPTS}",
    ),
    _ROWS: _ngram_only(_MOST, _writes_rows, rows=True),
    _MIN: _ngram_only(_SHORTEST, _writes_suffix(_SHORTEST)),
    _MAX: _ngram_only(_LONGEST, _writes_suffix(_LONGEST)),
    "--speculative-draft-model-path": Refused(f"{_MODELS}; {_SWITCH} NGRAM needs none"),
    "--speculative-draft-model-revision": Refused(f"{_MODELS}; {_SWITCH} NGRAM needs none"),
    "--speculative-num-steps": NoEffect(
        f"NGRAM has no steps; {_ROWS} limits drafts, and other algorithms are refused"
    ),
    "--speculative-eagle-topk": Refused(f"{_HEADS}; NGRAM has no top-k", off=(1,)),
    "--speculative-accept-threshold-single": _LOSSY,
    "--speculative-accept-threshold-acc": _LOSSY,
    "--speculative-token-map": Refused(f"{_HEADS}; NGRAM has no vocabulary of its own"),
    "--speculative-attention-mode": NoEffect("the same kernels attend in every step"),
    "--speculative-moe-runner-backend": NoEffect("NGRAM has no draft model"),
    "--speculative-ngram-min-bfs-breadth": Refused(_TREES, off=(1,)),
    "--speculative-ngram-max-bfs-breadth": Refused(_TREES, off=(1,)),
    "--speculative-ngram-match-type": NoEffect(
        "drafts follow the newest occurrence, as BFS does",
        only=("BFS",),
        otherwise="not offered: the most frequent continuation; BFS works, the newest one",
    ),
    "--speculative-ngram-branch-length": NoEffect("the index has no depth: it refers to the text"),
    "--speculative-ngram-capacity": NoEffect(
        "the index is not shared by requests; speculation.index_memory limits it"
    ),
}

# LightLLM

LIGHTLLM: Mapping[str, Rule] = {
    "--mtp_mode": Refused(f"{_HEADS}; {_ANY_MODEL}"),
    "--mtp_draft_model_dir": Refused(f"{_HEADS}; {_ANY_MODEL}"),
    "--mtp_step": Refused(f"{_HEADS}; {_ANY_MODEL}"),
}

# RTP-LLM

_NO_LOOKUP = "no --sp-type looks prompts up; with speculation.method ngram, set speculation."
RTP_LLM: Mapping[str, Rule] = {
    "--sp-type": Refused(
        f"not yet: drafts by a separate model (vanilla) or by MTP layers (mtp); {_ANY_MODEL}"
    ),
    "--sp-model-type": Refused(f"{_MODELS}; {_ANY_MODEL}"),
    "--sp-min-token-match": NoEffect(f"{_NO_LOOKUP}shortest_suffix"),
    "--sp-max-token-match": NoEffect(f"{_NO_LOOKUP}longest_suffix"),
    "--gen-num-per-cycle": NoEffect("it has no effect without --sp-type, which is refused"),
    "--force-stream-sample": NoEffect("it changes how drafts are verified, not the result"),
    "--force-score-context-attention": NoEffect("the same kernels attend in every step"),
    "--tree-decode-config": Refused(
        "a constraint on tokens, not speculation; requests may have a regular expression, a "
        "grammar or a choice instead"
    ),
}

# The backend

_DRAFTING = "optimisations.speculative_decoding."
_EXTRA = f"{_DRAFTING}extra_params."
_WHY = {"draft": _MODELS, "eagle": _HEADS, "eagle3": _HEADS, "nextn": _HEADS}


def _refuse_algorithm(value: str) -> None:
    if value != "n-gram":
        raise Refusal(f"algorithm {value}: {_WHY[value]}; n-gram works with any model")


def _of_enabled(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    if not value:
        return Harmless("there are no drafts")
    if f"{_EXTRA}algorithm" not in given:  # otherwise that parameter's rule refuses
        _refuse_algorithm("draft")
    return {_METHOD: "ngram"}


def _if_enabled(
    read: Callable[[Any], Effect | Harmless],
) -> Callable[[Any, Mapping[str, Any]], Effect | Harmless]:
    """Return a `reads` function of a parameter without effect unless speculation is enabled."""

    def reads(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        if not given.get(f"{_DRAFTING}enabled"):
            return Harmless(f"it has no effect without {_DRAFTING}enabled")
        return read(value)

    return reads


def _of_backend_algorithm(value: str) -> Effect:
    _refuse_algorithm(value)
    return Effect({}, f"chains from each request's own text; {_ADAPTS}")


def _of_extra(value: Any, given: Mapping[str, Any]) -> Harmless:
    if value:
        raise Refusal("expected an object of options")
    return Harmless("no options are given")


BACKEND: Mapping[str, Rule] = {
    f"{_DRAFTING}enabled": Means(
        keys=(_METHOD,),
        reads=_of_enabled,
        writes=lambda settings: settings.get(_METHOD) == "ngram" or UNSAID,
    ),
    f"{_DRAFTING}type": NoEffect(
        "auto names no method; extra_params.algorithm does",
        only=("auto",),
        otherwise="supported: auto, with extra_params.algorithm n-gram",
    ),
    f"{_DRAFTING}extra_params": Means(
        keys=(), reads=_of_extra, effective=False, why="see its parameters below"
    ),
    f"{_EXTRA}algorithm": Means(
        keys=(),  # `enabled` sets the method
        reads=_if_enabled(_of_backend_algorithm),
        writes=_writes_ngram("n-gram"),
        how=_ADAPTS,
        why="n-gram; others are refused",
    ),
    f"{_EXTRA}num_draft_tokens": Means(
        keys=(_MOST,),
        reads=_if_enabled(lambda value: Effect({_MOST: _drafts(value)}, _ADAPTS)),
        writes=_writes_rows,
        how=_ADAPTS,
    ),
    f"{_EXTRA}draft_model_path": Refused(f"{_MODELS}; n-gram needs none"),
    f"{_EXTRA}num_steps": NoEffect("n-gram has no steps; num_draft_tokens limits drafts"),
    f"{_EXTRA}topk": Refused(f"{_TREES}; n-gram has no top-k", off=(1,)),
    f"{_EXTRA}tp_size": NoEffect("n-gram has no draft model to divide among ranks"),
}
