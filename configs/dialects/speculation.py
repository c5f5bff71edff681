"""Rules of the parameters of speculative decoding, for each server.

The servers count drafts differently: SGLang and the backend count the rows of a verifying step,
which are the drafts and one more; RTP-LLM and LightLLM count drafts. remora counts drafts. Draft
models and heads make chains here: a step that branches (top-k above 1) is refused.
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
    never,
)

_METHOD, _MOST = "speculation.method", "speculation.max_drafts"
_SHORTEST, _LONGEST = "speculation.shortest_suffix", "speculation.longest_suffix"
_MODEL, _SHARED = "speculation.draft_model", "speculation.shared_index_memory"
_ADAPTS = "the draft length adapts to acceptance, see speculation.adaptive"
_TREES = "not yet: trees of drafts; 1 works, a chain"
_FEW = "a step verifies one row more than it has drafts: at least 2"
_CHAINED = ("draft", "eagle", "mtp")
_OWN_LAYER = "the MTP layer is read from the model's own checkpoint"
_KERNELS = "a draft model or head has the model's kernels"


def _writes(key: str, *methods: str) -> Callable[[Settings], Any]:
    """Return a `writes` function of a key that counts with these methods."""
    return lambda settings: (
        settings.get(key, UNSAID) if settings.get(_METHOD) in methods else UNSAID
    )


def _named(names: Mapping[str, Any]) -> Callable[[Settings], Any]:
    """Return a `writes` function of what names the method."""
    return lambda settings: names.get(settings.get(_METHOD, ""), UNSAID)


def _writes_rows(settings: Settings) -> Any:
    if settings.get(_METHOD) != "ngram" or _MOST not in settings:
        return UNSAID
    return settings[_MOST] + 1


def _drafts(rows: int) -> int:
    if rows < 2:
        raise Refusal(_FEW)
    return rows - 1


# Numbers of steps mean trees there, unless a width of 1 goes with them.
_WIDTH = Refused(
    _TREES,
    off=(1,),
    keys=(_MOST,),
    writes=lambda settings: (
        1 if settings.get(_METHOD) in _CHAINED and _MOST in settings else UNSAID
    ),
)

# SGLang

_SWITCH = "--speculative-algorithm"
_PATH, _STEPS = "--speculative-draft-model-path", "--speculative-num-steps"
_ROWS, _TOP = "--speculative-num-draft-tokens", "--speculative-eagle-topk"
_MIN = "--speculative-ngram-min-match-window-size"
_MAX = "--speculative-ngram-max-match-window-size"
_EAGLE = ("EAGLE", "EAGLE3", "NEXTN")
_OFF = Harmless(f"it has no effect without {_SWITCH}")


def _of_algorithm(value: str, given: Mapping[str, Any]) -> Effect | Settings:
    """Set what an algorithm means with SGLang's own defaults."""
    if value == "NGRAM":
        longest = given.get(_MAX, 12)
        own = {_METHOD: "ngram", _SHORTEST: given.get(_MIN, 1), _LONGEST: longest}
        return own if _ROWS in given else {**own, _MOST: max(1, longest - 1)}
    path = given.get(_PATH)
    if value == "STANDALONE" and not path:
        raise Refusal(f"STANDALONE needs {_PATH}, a smaller model with the same vocabulary")
    if value == "EAGLE3" and not path:
        raise Refusal(f"EAGLE3 needs {_PATH}, a head that was trained for the model")
    if _STEPS not in given and (_ROWS in given or _TOP in given):
        raise Refusal(f"{_ROWS} and {_TOP} need {_STEPS}, here as there")
    method = "draft" if value == "STANDALONE" else "eagle" if path else "mtp"
    steps = {} if _STEPS in given else {_MOST: 5 if method == "eagle" else 3}
    how = f"a chain, no tree; {_ADAPTS}"
    return Effect({_METHOD: method, **steps}, f"{_OWN_LAYER}; {how}" if method == "mtp" else how)


def _ngram_only(key: str, writes: Callable[[Settings], Any]) -> Means:
    """Return the rule of a parameter that counts only with NGRAM."""

    def read(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
        if given.get(_SWITCH) != "NGRAM":
            return Harmless(f"it has no effect without {_SWITCH} NGRAM")
        if key == _LONGEST and _ROWS not in given:
            _drafts(value)  # the default of --speculative-num-draft-tokens
        return Effect({key: value})

    return Means(keys=(key,), reads=read, writes=writes)


_ENTRY_BYTES = 16  # a place of the table at half its load, and the tokens


def _of_capacity(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    if given.get(_SWITCH) != "NGRAM":
        return Harmless(f"it has no effect without {_SWITCH} NGRAM")
    if value < 1:
        raise Refusal("the store has at least 1 entry; without it, no text is kept")
    return Effect({_SHARED: _ENTRY_BYTES * value}, "16 bytes an entry, apart by adapter and salt")


def _writes_capacity(settings: Settings) -> Any:
    memory = settings.get(_SHARED)
    if settings.get(_METHOD) != "ngram" or memory is None or memory < _ENTRY_BYTES:
        return UNSAID
    return memory // _ENTRY_BYTES


def _of_rows(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    algorithm = given.get(_SWITCH)
    if algorithm == "NGRAM":
        return Effect({_MOST: _drafts(value)}, _ADAPTS)
    if algorithm is None:
        return _OFF
    return Harmless(f"a chain has as many drafts as {_STEPS} says")


def _of_steps(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    algorithm = given.get(_SWITCH)
    if algorithm is None:
        return _OFF
    if algorithm == "NGRAM":
        return Harmless(f"NGRAM has no steps; {_ROWS} limits drafts")
    return Effect({_MOST: value}, _ADAPTS)


def _of_path(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    algorithm = given.get(_SWITCH)
    if algorithm in ("STANDALONE", *_EAGLE):
        return Effect({_MODEL: value})
    return _OFF if algorithm is None else Harmless("NGRAM has no draft model")


def _of_token_map(value: str, given: Mapping[str, Any]) -> Harmless:
    if given.get(_SWITCH) in ("EAGLE", "NEXTN", "STANDALONE"):
        raise Refusal(
            "not yet: a smaller vocabulary for the head of another draft model; EAGLE3 heads "
            "bring one"
        )
    return Harmless("EAGLE3 heads have a vocabulary of their own, and others are not drafted from")


_LOSSY = NoEffect(
    "a draft is accepted if it is the token that would have been sampled",
    only=(1.0,),
    otherwise="not offered: accepting other drafts than the sampled tokens; 1.0 works",
)

SGLANG: Mapping[str, Rule] = {
    _SWITCH: Means(
        keys=(_METHOD, _SHORTEST, _LONGEST, _MOST),
        reads=_of_algorithm,
        writes=_named({"ngram": "NGRAM", "draft": "STANDALONE", "eagle": "EAGLE", "mtp": "NEXTN"}),
        how=f"chains, no trees, from each request's own text first; {_ADAPTS}",
    ),
    _ROWS: Means(keys=(_MOST,), reads=_of_rows, writes=_writes_rows, how=_ADAPTS),
    _MIN: _ngram_only(_SHORTEST, _writes(_SHORTEST, "ngram")),
    _MAX: _ngram_only(_LONGEST, _writes(_LONGEST, "ngram")),
    _PATH: Means(keys=(_MODEL,), reads=_of_path),
    "--speculative-draft-model-revision": Refused(
        "the revision is part of the draft model's name: OWNER/NAME@REVISION", off=("main",)
    ),
    _STEPS: Means(keys=(_MOST,), reads=_of_steps, writes=_writes(_MOST, *_CHAINED), how=_ADAPTS),
    _TOP: _WIDTH,
    "--speculative-accept-threshold-single": _LOSSY,
    "--speculative-accept-threshold-acc": _LOSSY,
    "--speculative-token-map": Means(
        keys=(),
        reads=_of_token_map,
        writes=never,
        why="EAGLE3 heads have one",
    ),
    "--speculative-attention-mode": NoEffect("the same kernels attend in every step"),
    "--speculative-moe-runner-backend": NoEffect(_KERNELS),
    "--speculative-ngram-min-bfs-breadth": Refused(_TREES, off=(1,)),
    "--speculative-ngram-max-bfs-breadth": Refused(_TREES, off=(1,)),
    "--speculative-ngram-match-type": NoEffect(
        "drafts follow the newest occurrence, as BFS does",
        only=("BFS",),
        otherwise="not offered: the most frequent continuation; BFS works, the newest one",
    ),
    "--speculative-ngram-branch-length": NoEffect("the index has no depth: it refers to the text"),
    "--speculative-ngram-capacity": Means(
        keys=(_SHARED,),
        reads=_of_capacity,
        writes=_writes_capacity,
        how="16 bytes an entry; only where it is given, texts serve later requests",
    ),
}

# LightLLM

_MTP_MODE, _MTP_DIR, _MTP_STEP = "--mtp_mode", "--mtp_draft_model_dir", "--mtp_step"


def _of_mtp_mode(value: str | None, given: Mapping[str, Any]) -> Effect | Harmless:
    if value is None:
        return Harmless("there are no drafts")
    most = {} if given.get(_MTP_STEP) else {_MOST: 1}
    return Effect({_METHOD: "mtp", **most}, f"{_OWN_LAYER}; {_ADAPTS}")


def _of_mtp_step(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    if not given.get(_MTP_MODE):
        return Harmless(f"it has no effect without {_MTP_MODE}")
    return Effect({_MOST: value}, _ADAPTS) if value else Harmless("0 leaves one draft")


LIGHTLLM: Mapping[str, Rule] = {
    _MTP_MODE: Means(
        keys=(_METHOD, _MOST),
        reads=_of_mtp_mode,
        writes=_named({"mtp": "deepseekv3"}),
        how=f"{_OWN_LAYER}; {_ADAPTS}",
    ),
    _MTP_DIR: NoEffect(f"{_OWN_LAYER}; a start without one is refused"),
    _MTP_STEP: Means(keys=(_MOST,), reads=_of_mtp_step, writes=_writes(_MOST, "mtp"), how=_ADAPTS),
}

# RTP-LLM

_SP_TYPE = "--sp-type"
_NO_LOOKUP = "no --sp-type looks prompts up; with speculation.method ngram, set speculation."


def _of_sp_type(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    if value != "mtp":
        return Harmless("by its own documentation, vanilla and no value disable speculation")
    most = {} if _PER_CYCLE in given else {_MOST: 1}
    return Effect({_METHOD: "mtp", **most}, f"{_OWN_LAYER}; {_ADAPTS}")


_PER_CYCLE = "--gen-num-per-cycle"


def _of_cycle(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    if given.get(_SP_TYPE) != "mtp":
        return Harmless(f"it has no effect without {_SP_TYPE} mtp")
    return Effect({_MOST: value}, _ADAPTS)


def _of_draft_type(value: str, given: Mapping[str, Any]) -> Harmless:
    if given.get(_SP_TYPE) == "mtp" and value and not value.endswith("mtp"):
        raise Refusal("with --sp-type mtp the draft is an MTP layer: a name that ends with mtp")
    return Harmless("the checkpoint says what its MTP layer is")


RTP_LLM: Mapping[str, Rule] = {
    _SP_TYPE: Means(
        keys=(_METHOD, _MOST),
        reads=_of_sp_type,
        writes=_named({"mtp": "mtp"}),
        how=f"{_OWN_LAYER}; {_ADAPTS}",
    ),
    "--sp-model-type": Means(
        keys=(), reads=_of_draft_type, writes=never, why="the checkpoint says it"
    ),
    "--sp-min-token-match": NoEffect(f"{_NO_LOOKUP}shortest_suffix"),
    "--sp-max-token-match": NoEffect(f"{_NO_LOOKUP}longest_suffix"),
    _PER_CYCLE: Means(keys=(_MOST,), reads=_of_cycle, writes=_writes(_MOST, "mtp"), how=_ADAPTS),
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
_ALGORITHM, _DRAFT_PATH = f"{_EXTRA}algorithm", f"{_EXTRA}draft_model_path"
_NUM_STEPS, _NUM_TOKENS = f"{_EXTRA}num_steps", f"{_EXTRA}num_draft_tokens"
_METHODS = {
    "n-gram": "ngram",
    "draft": "draft",
    "eagle": "eagle",
    "eagle3": "eagle",
    "nextn": "mtp",
}
_STEPS_THERE = 5


def _of_enabled(value: bool, given: Mapping[str, Any]) -> Effect | Harmless:
    if not value:
        return Harmless("there are no drafts")
    algorithm = given.get(_ALGORITHM, "draft")
    if algorithm == "n-gram":
        return Effect({_METHOD: "ngram"})
    path = given.get(_DRAFT_PATH)
    if algorithm == "draft" and not path:
        raise Refusal(
            "the model would draft for itself, which gains nothing: name a smaller model in "
            "extra_params.draft_model_path, or set algorithm to n-gram"
        )
    if algorithm != "nextn" and not path:
        raise Refusal(
            f"{algorithm} needs a head in extra_params.draft_model_path; n-gram needs none"
        )
    settings: dict[str, Any] = {_METHOD: _METHODS[algorithm]}
    if _NUM_STEPS not in given and _NUM_TOKENS not in given:
        settings |= {_MOST: _STEPS_THERE}
    return Effect(settings, f"a chain, no tree; {_ADAPTS}")


def _if_enabled(
    read: Callable[[Any, Mapping[str, Any]], Effect | Harmless],
) -> Callable[[Any, Mapping[str, Any]], Effect | Harmless]:
    """Return a `reads` function of a parameter without effect unless speculation is enabled."""

    def reads(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        if not given.get(f"{_DRAFTING}enabled"):
            return Harmless(f"it has no effect without {_DRAFTING}enabled")
        return read(value, given)

    return reads


def _of_backend_algorithm(value: str, given: Mapping[str, Any]) -> Effect:
    return Effect({_METHOD: _METHODS[value]}, f"chains, no trees; {_ADAPTS}")


def _of_limits(value: int, given: Mapping[str, Any]) -> Effect:
    """Set the drafts of a chain: one for each step, and one fewer than verified rows."""
    if given.get(_ALGORITHM, "draft") == "n-gram":
        return Effect({_MOST: _drafts(value)}, _ADAPTS)
    steps = given.get(_NUM_STEPS, _STEPS_THERE)
    return Effect({_MOST: min(steps, _drafts(given.get(_NUM_TOKENS, steps + 1)))}, _ADAPTS)


def _of_num_steps(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    if given.get(_ALGORITHM, "draft") == "n-gram":
        return Harmless("n-gram has no steps; num_draft_tokens limits drafts")
    return _of_limits(value, given)


def _of_draft_path(value: str | None, given: Mapping[str, Any]) -> Effect | Harmless:
    algorithm = given.get(_ALGORITHM, "draft")
    if not value:
        return Harmless("no draft model is named")
    if algorithm == "n-gram":
        return Harmless("n-gram has no draft model")
    if algorithm == "nextn":
        raise Refusal(f"with {_ALGORITHM} nextn, {_OWN_LAYER}: leave it out")
    return Effect({_MODEL: value})


def _of_extra(value: Any, given: Mapping[str, Any]) -> Harmless:
    if value:
        raise Refusal("expected an object of options")
    return Harmless("no options are given")


BACKEND: Mapping[str, Rule] = {
    f"{_DRAFTING}enabled": Means(
        keys=(_METHOD, _MOST),
        reads=_of_enabled,
        writes=lambda settings: settings.get(_METHOD, "none") != "none" or UNSAID,
        how=f"chains, no trees; {_ADAPTS}",
    ),
    f"{_DRAFTING}type": NoEffect(
        "auto names no method; extra_params.algorithm does",
        only=("auto",),
        otherwise="supported: auto, with extra_params.algorithm",
    ),
    f"{_DRAFTING}extra_params": Means(keys=(), reads=_of_extra, why="see its parameters below"),
    _ALGORITHM: Means(
        keys=(_METHOD,),
        reads=_if_enabled(_of_backend_algorithm),
        writes=_named({"ngram": "n-gram", "draft": "draft", "eagle": "eagle", "mtp": "nextn"}),
        how=_ADAPTS,
        why="see extra_params",
    ),
    _NUM_TOKENS: Means(
        keys=(_MOST,), reads=_if_enabled(_of_limits), writes=_writes_rows, how=_ADAPTS
    ),
    _DRAFT_PATH: Means(keys=(_MODEL,), reads=_if_enabled(_of_draft_path)),
    _NUM_STEPS: Means(
        keys=(_MOST,),
        reads=_if_enabled(_of_num_steps),
        writes=_writes(_MOST, *_CHAINED),
        how=_ADAPTS,
    ),
    f"{_EXTRA}topk": _WIDTH,
    f"{_EXTRA}tp_size": NoEffect("the whole draft model runs on rank 0"),
}
