"""Sampling parameters of llama.cpp's bodies, and the same parameters under llama.cpp's names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.constraints import OutputConstraint
from remora.deployments.http.generation.sampling import (
    as_seed,
    check_vocabulary,
    sampling_params,
)
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.llamacpp.bodies import RANDOM_SEEDS, SAMPLERS, LlamaBody
from remora.engine.types import SamplingParams

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

_NAMES: Mapping[str, str] = {
    "max_tokens": "n_predict",
    "logprobs": "n_probs",
    "n": "n_cmpl",
    "bad_words": "logit_bias",
}
# Parameter -> the value that switches it off.
_NEUTRAL: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
}
_PENALTIES, _INFILL = "penalties", "infill"
# Samplers whose result does not depend on the temperature, if nothing else comes between.
_BY_ORDER = (_PENALTIES, "top_k")


def llama_sampling(
    server: ServerState, body: LlamaBody, constraint: OutputConstraint | None
) -> SamplingParams:
    """Return the SamplingParams of a body. Raises InvalidSampling and InvalidRequest."""
    biases, banned = _biases(server.tokenizer, body)
    check_vocabulary(banned, server.tokenizer.vocab_size, "logit_bias")
    if banned and constraint is not None:
        raise InvalidRequest(
            f"logit_bias with false cannot be combined with {constraint.param}: it forbids tokens "
            "that the constraint may need.",
            "logit_bias",
        )
    changes: dict[str, Any] = {"logit_bias": biases, "n": body.num_answers}
    names = _NAMES
    if body.temperature is not None:
        changes["temperature"] = max(0.0, body.temperature)
    if body.top_k is not None:
        changes["top_k"] = max(0, body.top_k)
    if body.repeat_penalty is not None:
        changes["repetition_penalty"] = body.repeat_penalty
        names = {**_NAMES, "repetition_penalty": "repeat_penalty"}
    if body.repeat_last_n == 0:
        changes |= {name: _NEUTRAL[name] for name in SAMPLERS[_PENALTIES]}
    sampling = sampling_params(
        body.model_copy(update=changes | _unlisted(body)),
        defaults=server.generation_defaults,
        vocab_size=server.tokenizer.vocab_size,
        names=names,
        max_tokens=None if body.limit is None else max(1, body.limit),
        seed=None if body.seed in RANDOM_SEEDS else as_seed(body.seed),
        include_stop_in_output=bool(body.no_stop_trim),
        logprobs=body.n_probs or None,
        bad_words_ids=tuple((token_id,) for token_id in banned),
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
        infill=_INFILL in (body.samplers or ()),
    )
    _check_window(server, body, sampling)
    _check_order(body.samplers or (), sampling)
    return sampling


def _biases(tokenizer: Tokenizer, body: LlamaBody) -> tuple[dict[int, float], list[int]]:
    """Return the bias of each token, and the banned tokens. A text means each of its tokens."""
    biases, banned = defaultdict[int, float](float), dict[int, None]()
    for token, bias in body.logit_bias or ():
        is_id = isinstance(token, int)
        for token_id in [token] if is_id else tokenizer.encode(token, add_special_tokens=False):
            if bias is False:
                banned[token_id] = None
            else:
                biases[token_id] += bias
    return dict(biases), list(banned)


def _unlisted(body: LlamaBody) -> dict[str, float]:
    """Return neutral values for the fields of samplers that `samplers` leaves out."""
    if body.samplers is None:
        return {}
    off = SAMPLERS.keys() - set(body.samplers)
    return {name: _NEUTRAL[name] for sampler in off for name in SAMPLERS[sampler]}


def _check_window(server: ServerState, body: LlamaBody, sampling: SamplingParams) -> None:
    window = body.repeat_last_n
    if (
        _is_active(_PENALTIES, sampling)
        and window is not None
        and 0 < window < server.plan.max_sequence_tokens
    ):
        raise unsupported(
            "repeat_last_n",
            f"repeat_last_n is {window}; penalties cover the whole text here. Send -1 for that, "
            "or 0 for no penalties.",
        )


def _check_order(samplers: Sequence[str], sampling: SamplingParams) -> None:
    """Raise InvalidRequest if another order of the samplers would give another result."""
    active = [name for name in samplers if name in SAMPLERS and _is_active(name, sampling)]
    if active[-1:] == ["temperature"] and all(name in _BY_ORDER for name in active[:-1]):
        active = active[:-1]
    order = [name for name in SAMPLERS if name in active]
    if active != order:
        raise unsupported(
            "samplers",
            f"samplers: {', '.join(active)} cannot be served in this order, only as "
            f"{', '.join(order)}. Leave samplers out for this order.",
        )


def _is_active(sampler: str, sampling: SamplingParams) -> bool:
    if sampling.is_greedy and sampler != _PENALTIES:
        return False
    if sampler == _INFILL:
        return sampling.infill
    return any(getattr(sampling, name) != _NEUTRAL[name] for name in SAMPLERS[sampler])


def settings_of(
    sampling: SamplingParams, *, n_ctx: int, body: LlamaBody | None = None
) -> dict[str, Any]:
    """Return `generation_settings`: parameters under llama.cpp's names.

    body:  None = the defaults of a body without fields
    """
    limit = None if body is None else body.limit
    num_predict = -1 if limit is None else limit
    return {
        "n_ctx": n_ctx,
        "n_predict": num_predict,
        "max_tokens": num_predict,
        "seed": RANDOM_SEEDS[1] if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": 0.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "xtc_probability": 0.0,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": 0.0,
        "mirostat": 0,
        "stop": list(sampling.stop),
        "n_keep": 0,
        "n_indent": 0 if body is None else body.n_indent or 0,
        "ignore_eos": sampling.ignore_eos,
        "stream": body is not None and bool(body.stream),
        "n_probs": sampling.logprobs or 0,
        "grammar": "" if body is None else body.grammar or "",
        "samplers": _samplers(body),
        "timings_per_token": body is not None and bool(body.timings_per_token),
        "post_sampling_probs": False,
        "lora": [],
    }


def _samplers(body: LlamaBody | None) -> list[str]:
    wanted = None if body is None else body.samplers
    return [name for name in SAMPLERS if name != _INFILL] if wanted is None else wanted
