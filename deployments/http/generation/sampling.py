"""SamplingParams from a request's fields: explicit value, else the model's default, else neutral.

An omitted field stays None throughout, so that it never competes with the default that the model's
authors recommend in its generation_config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from remora.configs.errors import InvalidRequest, InvalidSampling
from remora.deployments.http.core.field_names import retold
from remora.deployments.http.core.fields import OpenAIBody, SamplingBody
from remora.engine.beams.params import BeamParams
from remora.engine.types import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from remora.deployments.http.generation.server_state import ServerState
    from remora.engine.tokens.tokenizer import Tokenizer

# Defaults of these do not apply to beam search, which draws no tokens.
_OF_DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
# Values of beam search's fields that mean nothing without it.
_WITHOUT_BEAMS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "num_beams": (1,),
        "length_penalty": (1.0,),
        "early_stopping": (False,),
        "num_beam_groups": (1,),
        "diversity_penalty": (0.0,),
    }
)
_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def sampling_params(
    fields: SamplingBody,
    *,
    defaults: Mapping[str, Any],
    vocab_size: int,
    names: Mapping[str, str] | None = None,
    prefix: str = "",
    beams: BeamParams | None = None,
    **given: Any,
) -> SamplingParams:
    """Return the SamplingParams of one request.

    defaults:  the model's generation_config
    given:     parameters whose field names differ by dialect: max_tokens, min_tokens, seed, ...
    beams:     of a beam search, as `beam_params` returns them; None = tokens are drawn
    names:     parameter -> the caller's field name; other parameters get `prefix`

    Raises InvalidSampling and InvalidRequest, with the caller's names.
    """
    biases = fields.logit_bias or {}
    stop_ids = fields.stop_token_ids or []

    def callers(name: str) -> str:
        known = (names or {}).get(name)
        return known or (prefix + name if name in _FIELDS else name)

    check_vocabulary(biases, vocab_size, callers("logit_bias"))
    check_vocabulary([id_ for id_ in stop_ids if id_ < 0], vocab_size, callers("stop_token_ids"))

    def pick(name: str, neutral: float) -> Any:
        explicit = getattr(fields, name)
        recommended = None if beams is not None and name in _OF_DRAWING else defaults.get(name)
        value = explicit if explicit is not None else recommended
        return neutral if value is None else value

    try:
        return SamplingParams(
            temperature=float(pick("temperature", 1.0)),
            top_k=max(0, int(pick("top_k", 0))),
            top_p=float(pick("top_p", 1.0)),
            min_p=float(pick("min_p", 0.0)),
            typical_p=float(pick("typical_p", 1.0)),
            presence_penalty=float(pick("presence_penalty", 0.0)),
            frequency_penalty=float(pick("frequency_penalty", 0.0)),
            repetition_penalty=float(pick("repetition_penalty", 1.0)),
            logit_bias=biases,
            stop=tuple(fields.stop or ()),
            stop_regex=tuple(fields.stop_regex or ()),
            # Ids beyond the vocabulary never occur; clients send those of other models.
            stop_token_ids=tuple(id_ for id_ in stop_ids if id_ < vocab_size),
            ignore_eos=bool(fields.ignore_eos),
            skip_special_tokens=fields.skip_special_tokens is not False,
            custom_logit_processor=fields.custom_logit_processor,
            custom_params=fields.custom_params or {},
            max_drafts=fields.max_drafts,
            beams=beams,
            **{"n": fields.n or 1, **given},
        )
    except InvalidSampling as error:
        raise retold(error, callers) from None


def beam_params(
    fields: SamplingBody, *, n: int, best_of: int | None = None, prefix: str = ""
) -> BeamParams | None:
    """Return the parameters of the beam search that a body asks for; None = it does not.

    n:        outputs in the response
    best_of:  beams, unless `num_beams` says how many

    Raises InvalidSampling and InvalidRequest, with the caller's names.
    """
    if not fields.is_beam_search:
        for name, harmless in _WITHOUT_BEAMS.items():
            if getattr(fields, name) not in (None, *harmless):
                raise InvalidRequest(
                    f"{prefix}{name} belongs to beam search; set {prefix}use_beam_search to true, "
                    "or leave it out.",
                    f"{prefix}{name}",
                )
        return None
    given: dict[str, Any] = {
        "length_penalty": fields.length_penalty,
        "early_stopping": fields.early_stopping,
        "num_groups": fields.num_beam_groups,
        "diversity_penalty": fields.diversity_penalty,
    }
    width = fields.num_beams if fields.num_beams is not None else max(n, best_of or n)
    try:
        return BeamParams(
            width=width, **{name: value for name, value in given.items() if value is not None}
        )
    except InvalidSampling as error:
        raise retold(error, lambda name: prefix + name) from None


def openai_sampling(
    fields: OpenAIBody,
    server: ServerState,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    names: Mapping[str, str] | None = None,
    **given: Any,
) -> SamplingParams:
    """Return the SamplingParams of a chat or text completion; `given` as in `sampling_params`."""
    tokenizer, n = server.tokenizer, fields.n or 1
    allowed = fields.allowed_token_ids or ()
    check_vocabulary(allowed, tokenizer.vocab_size, "allowed_token_ids")
    asked = fields.logprob_token_ids or ()
    check_vocabulary(asked, tokenizer.vocab_size, "logprob_token_ids")
    if asked and logprobs is None:
        message = "logprob_token_ids needs logprobs, which is not set."
        raise InvalidRequest(message, "logprob_token_ids")
    return sampling_params(
        fields,
        defaults=server.generation_defaults,
        vocab_size=tokenizer.vocab_size,
        names={"bad_words_ids": "bad_words", **(names or {})},
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        seed=as_seed(fields.seed),
        include_stop_in_output=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(asked),
        bad_words_ids=_runs(tokenizer, fields.bad_words or ()),
        allowed_token_ids=tuple(allowed),
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
        hidden_states=bool(fields.return_hidden_states),
        beams=beam_params(fields, n=n, best_of=fields.best_of),
        **given,
    )


def _runs(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of the words, both at the start of a line and after a space."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    runs = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(run for run in runs if run))


def as_seed(seed: int | None) -> int | None:
    """Return any 64-bit seed, signed or not, in the engine's range; equal seeds stay equal."""
    return None if seed is None else seed & MAX_SEED


def check_vocabulary(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if one of the ids is outside the vocabulary."""
    bad = min(ids, default=0)
    if bad >= 0:
        bad = max(ids, default=0)
    if not 0 <= bad < vocab_size:
        message = f"{param} holds {str(bad)[:20]}; token ids lie between 0 and {vocab_size - 1}."
        raise InvalidRequest(message, param)
