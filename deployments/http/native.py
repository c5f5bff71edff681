"""/generate in SGLang's shape: its body, and its objects with `text`, `output_ids`, `meta_info`.

A stream's events hold everything since the start, not only what is new. One text gives an object,
a list of texts (or n > 1) gives a list; events of a stream over several have an `index`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.calls import OpenCall
from remora.deployments.http.choices import Choice, Choices
from remora.deployments.http.errors import unsupported
from remora.deployments.http.fields import MAX_SEQUENCES
from remora.deployments.http.logprobs import Line, LogprobWriter, check_num_entries
from remora.deployments.http.native_bodies import GenerateBody, NativeSampling
from remora.deployments.http.prompts import check_room, prompt_ids
from remora.deployments.http.sampling import as_seed, sampling_params
from remora.deployments.http.served import Served
from remora.engine.types import FinishReason, Request, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "seed": "sampling_params.sampling_seed",
    "include_stop_in_output": "sampling_params.no_stop_trim",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """One validated /generate request, of one or many prompts.

    is_list:  whether the answer is a list
    """

    body: GenerateBody
    rid: str
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    is_list: bool
    started: float
    writer: LogprobWriter

    @property
    def streams(self) -> bool:
        """Whether the client wants chunks."""
        return bool(self.body.stream)

    @property
    def requests(self) -> tuple[Request, ...]:
        """What the engine gets."""
        return tuple(
            Request(
                request_id=self.rid,
                prompt_ids=ids,
                sampling=sampling,
                priority=self.body.priority or 0,
                cache_salt=self.body.cache_salt or "",
            )
            for ids, sampling in zip(self.prompts, self.samplings, strict=True)
        )

    async def result(self, outputs: OpenCall) -> Any:
        """Return the whole answer."""
        choices = self._choices()
        await choices.gather(outputs)
        answers = [self._answer(choices, choice) async for choice in choices.each()]
        return answers if self.is_list else answers[0]

    async def chunks(self, outputs: OpenCall) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what each choice has become, whenever one has grown."""
        choices = self._choices()
        async for event in outputs:
            choice = choices.add(event)
            answer = self._answer(choices, choice)
            if self.is_list:
                answer["index"] = choices.number(choice)
            yield answer

    def _choices(self) -> Choices:
        return Choices(len(self.prompts), self.samplings[0].n)

    def _answer(self, choices: Choices, choice: Choice) -> dict[str, Any]:
        meta = {
            "id": self.rid,
            "finish_reason": self._finish_reason(choice),
            "prompt_tokens": len(self.prompts[choice.prompt]),
            "completion_tokens": choice.num_output_tokens,
            "cached_tokens": choice.num_cached_tokens,
            "weight_version": "default",
            "e2e_latency": time.monotonic() - self.started,
        }
        if self.body.return_logprob:
            meta |= self._logprobs(choices, choice)
        return {"text": choice.text, "output_ids": list(choice.token_ids), "meta_info": meta}

    def _finish_reason(self, choice: Choice) -> dict[str, Any] | None:
        if choice.finish_reason is None:
            return None
        if choice.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": choice.num_output_tokens}
        if choice.finish_reason is FinishReason.ABORT:
            return {"type": "abort", "message": "Aborted."}
        matched = choice.stop_reason
        if matched is None and choice.token_ids:
            matched = choice.token_ids[-1]  # the model's own end
        return {"type": "stop", "matched": matched}

    def _logprobs(self, choices: Choices, choice: Choice) -> dict[str, Any]:
        """Return all log-probabilities of a choice so far; only the new ones are written."""
        write, write_top = self.writer.native, self.writer.native_top
        with_text, has_top = bool(self.body.return_text_in_logprobs), self.body.top_logprobs_num
        written = choice.written
        # The prompt's come with the first output of any of its choices.
        if not written.get("input_token_logprobs"):
            ids, lines = self._prompt_lines(choices, choice)
            written["input_token_logprobs"] = write(ids, lines, with_text=with_text)
            if has_top:
                written["input_top_logprobs"] = write_top(lines, with_text=with_text)
        output = written.setdefault("output_token_logprobs", [])
        new = slice(len(output), None)
        ids, lines = choice.token_ids[new], [*choice.logprobs[new]]
        output += write(ids, lines, with_text=with_text)
        if has_top:
            top = written.setdefault("output_top_logprobs", [])
            top += write_top(lines, with_text=with_text)
        # Copies: an event stays as it is while the choice goes on.
        return {name: list(values) for name, values in written.items()}

    def _prompt_lines(self, choices: Choices, choice: Choice) -> tuple[list[int], list[Line]]:
        """Return ids and log-probabilities of the prompt from `logprob_start_len` on."""
        start = self.body.logprob_start_len
        if start is None or start < 0:
            return [], []
        lines = list(choices.prompt_logprobs(choice) or ())[start:]
        return (self.prompts[choice.prompt][start:], lines) if lines else ([], [])


def _check_n(bodies: Sequence[NativeSampling], num_prompts: int) -> None:
    if any(body.n != bodies[0].n for body in bodies):
        message = "n must be the same for all prompts of a batch."
        raise unsupported("sampling_params.n", message)
    if (bodies[0].n or 1) * num_prompts > MAX_SEQUENCES:
        message = f"n times the number of prompts must not exceed {MAX_SEQUENCES}."
        raise InvalidRequest(message, "sampling_params.n")


def _sampling(served: Served, body: GenerateBody, fields: NativeSampling) -> SamplingParams:
    max_tokens = fields.max_new_tokens
    top = (body.top_logprobs_num or 0) if body.return_logprob else None
    wants_prompt = body.logprob_start_len is not None and body.logprob_start_len >= 0
    return sampling_params(
        fields,
        defaults=served.generation_defaults,
        vocab_size=served.tokenizer.vocab_size,
        names=_NAMES,
        prefix="sampling_params.",
        max_tokens=DEFAULT_MAX_NEW_TOKENS if max_tokens is None else max_tokens,
        min_tokens=fields.min_new_tokens or 0,
        seed=as_seed(fields.sampling_seed),
        include_stop_in_output=bool(fields.no_stop_trim),
        logprobs=top,
        prompt_logprobs=top if wants_prompt else None,
    )


def _check_logprobs(
    body: GenerateBody, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]
) -> None:
    if not body.return_logprob:
        return
    num_tokens = sum(
        sampling.n
        * ((sampling.max_tokens or 0) + (0 if sampling.prompt_logprobs is None else len(ids)))
        for ids, sampling in zip(prompts, samplings, strict=True)
    )
    top = body.top_logprobs_num or 0
    check_num_entries(num_tokens, top, "top_logprobs_num", is_repeated=bool(body.stream))


async def prepare_generate(served: Served, body: GenerateBody, rid: str) -> GenerateJob:
    """Check everything that can be checked before the engine is asked.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    started = time.monotonic()
    served.check_model(body.model)
    given, param = body.given
    _check_n(body.sampling_params, body.num_prompts)
    samplings = [_sampling(served, body, entry) for entry in body.sampling_params]
    if len(samplings) < body.num_prompts:
        samplings *= body.num_prompts
    prompts = await prompt_ids(
        served.tokenizer, served.plan, given.prompts, add_special_tokens=True, param=param
    )
    for ids, sampling in zip(prompts, samplings, strict=True):
        check_room(len(ids), sampling.max_tokens, served.plan, param)
    _check_logprobs(body, prompts, samplings)
    return GenerateJob(
        body=body,
        rid=rid,
        prompts=prompts,
        samplings=samplings,
        is_list=given.is_list or samplings[0].n > 1,
        started=started,
        writer=LogprobWriter(served.tokenizer),
    )
