"""/generate in SGLang's shape: from a body to a job.

One text gives an object, a list of texts (or n > 1) gives a list; events of a stream over several
have an `index`. An event holds everything since the start, or with `api.stream_text: delta` what
is new.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import check_sequences, limit
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.choices import Choices
from remora.deployments.http.generation.constraints import grammar_of
from remora.deployments.http.generation.logprobs import LogprobWriter, check_num_entries
from remora.deployments.http.generation.prompts import check_room, prompt_ids, usual_cut
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.sampling import as_seed, sampling_params
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.sglang.answers import AnswerWriter, Prompt
from remora.deployments.http.sglang.bodies import GenerateBody, PromptOptions
from remora.engine.types import Grammar, Request, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
PREFIX = "sampling_params."
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

    heals:     for each prompt, whether its last token is taken back and written anew
    lora_ids:  for each prompt; 0 = the base model
    num_kept:  tokens that stand before the prompts of a task
    is_list:   whether the answer is a list
    is_delta:  whether an event of a stream holds only what is new
    """

    body: GenerateBody
    rid: str
    lora_ids: list[int]
    num_kept: int
    prompts: list[Prompt]
    samplings: list[SamplingParams]
    grammars: list[Grammar | None]
    heals: list[bool]
    is_list: bool
    is_delta: bool
    started: float
    eos_ids: Collection[int]
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
                request_id=prompt.name,
                prompt_ids=prompt.ids,
                sampling=sampling,
                priority=self.body.priority or 0,
                cache_salt=self.body.cache_salt or "",
                grammar=grammar,
                heal=heal,
                lora_id=lora_id,
                kept_tokens=self.num_kept,
            )
            for prompt, sampling, grammar, heal, lora_id in zip(
                self.prompts, self.samplings, self.grammars, self.heals, self.lora_ids, strict=True
            )
        )

    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole answer."""
        choices = self._choices()
        await choices.gather(outputs)
        writer = self._answers(choices, is_delta=False)
        answers = [writer.write(choice) async for choice in choices.each()]
        return answers if self.is_list else answers[0]

    async def chunks(self, outputs: OutputStream) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what each choice has become, whenever one has grown."""
        choices = self._choices()
        writer = self._answers(choices, is_delta=self.is_delta)
        async for event in outputs:
            choice = choices.add(event)
            if not writer.is_due(choice):
                continue
            answer = writer.write(choice)
            if self.is_list:
                answer["index"] = choices.number(choice)
            yield answer

    def _choices(self) -> Choices:
        return Choices(len(self.prompts), self.samplings[0].n)

    def _answers(self, choices: Choices, *, is_delta: bool) -> AnswerWriter:
        return AnswerWriter(
            self.prompts,
            choices,
            self.writer,
            started=self.started,
            with_text=bool(self.body.return_text_in_logprobs),
            is_delta=is_delta,
            eos_ids=self.eos_ids,
        )


def _check_n(options: Sequence[PromptOptions]) -> None:
    n = options[0].sampling.n or 1
    if any((one.sampling.n or 1) != n for one in options):
        message = "n must be the same for all prompts of a batch."
        raise unsupported("sampling_params.n", message)
    check_sequences(n * len(options), "sampling_params.n")


def _check_hidden(server: ServerState, body: GenerateBody, num_tokens: int) -> None:
    """Raise InvalidRequest if hidden states are asked for and not to be had.

    num_tokens:  of all prompts and outputs
    """
    name = "return_hidden_states"
    if not body.return_hidden_states:
        return
    if not server.config.api.hidden_states:
        raise unsupported(name, f"{name}: this server tells none; its api.hidden_states is off.")
    allowed = limit("max_hidden_tokens")
    if num_tokens > allowed:
        message = (
            f"{name}: prompts and outputs may have {num_tokens} tokens together; hidden states are "
            f"told of {allowed} at most. Send less at a time, or lower max_new_tokens."
        )
        raise InvalidRequest(message, name, limit="max_hidden_tokens")


def _sampling(server: ServerState, body: GenerateBody, options: PromptOptions) -> SamplingParams:
    fields = options.sampling
    max_tokens = fields.max_new_tokens
    min_tokens = fields.min_new_tokens or 0
    top = options.top_logprobs_num if options.return_logprob else None
    if max_tokens == 0 and min_tokens:
        param = "sampling_params.min_new_tokens"
        raise InvalidRequest(f"{param} must be 0 where max_new_tokens is.", param)
    return sampling_params(
        fields,
        defaults=server.generation_defaults,
        vocab_size=server.tokenizer.vocab_size,
        names=_NAMES,
        prefix=PREFIX,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if max_tokens is None else max(1, max_tokens),
        min_tokens=min_tokens,
        seed=as_seed(fields.sampling_seed),
        include_stop_in_output=bool(fields.no_stop_trim),
        logprobs=top,
        prompt_logprobs=top if options.logprob_start_len >= 0 else None,
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
        hidden_states=bool(body.return_hidden_states),
    )


def _check_logprobs(
    prompts: Sequence[Prompt], samplings: Sequence[SamplingParams], *, is_repeated: bool
) -> None:
    """Raise InvalidRequest if the answer, or one event of a stream, may be too large."""
    num_tokens = 0
    for prompt, sampling in zip(prompts, samplings, strict=True):
        if sampling.logprobs is not None:
            num_tokens += sampling.n * (sampling.max_tokens or 0)
        if sampling.prompt_logprobs is not None:
            num_tokens += sampling.n * len(prompt.ids)
    top = max(sampling.logprobs or 0 for sampling in samplings)
    check_num_entries(num_tokens, top, "top_logprobs_num", is_repeated=is_repeated)


def heals(server: ServerState, sampling: SamplingParams, grammar: Grammar | None) -> bool:
    """Whether the last token of a prompt that came as text is taken back and written anew."""
    is_free = grammar is None and sampling.prompt_logprobs is None
    return server.config.grammar.token_healing and is_free


async def prepare_generate(server: ServerState, body: GenerateBody, rid: str) -> GenerateJob:
    """Check everything that can be checked before the engine is asked.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    started = time.monotonic()
    own = await server.model(body.model)
    given, param = body.given
    options = body.options
    lora_ids = [
        (own if one.adapter is None else await server.model(one.adapter, "lora_path")).lora_id
        for one in options
    ]
    _check_n(options)
    samplings = [_sampling(server, body, one) for one in options]
    n = samplings[0].n
    server.calls.check_size(n * len(options), f"{PREFIX}n" if n > 1 else param)
    longest = max(sampling.max_tokens or 1 for sampling in samplings)
    task = server.tasks.ids(body.task_id)
    ids = await prompt_ids(
        server,
        given.prompts,
        add_special_tokens=True,
        param=param,
        cut=usual_cut(server, longest),
        before=task,
    )
    prompts = [
        Prompt(
            name=one.rid or (f"{rid}_{number}" if len(options) > 1 else rid),
            ids=ids[number],
            options=one,
            is_dry=one.sampling.max_new_tokens == 0,
        )
        for number, one in enumerate(options)
    ]
    for prompt, sampling in zip(prompts, samplings, strict=True):
        check_room(len(prompt.ids), sampling.max_tokens, server.plan, param)
    pairs = zip(prompts, samplings, strict=True)
    _check_hidden(server, body, sum(len(one.ids) + (two.max_tokens or 0) for one, two in pairs))
    is_delta = server.config.api.stream_text == "delta"
    _check_logprobs(prompts, samplings, is_repeated=bool(body.stream) and not is_delta)
    grammars = [await grammar_of(server, one.sampling, prefix=PREFIX) for one in options]
    return GenerateJob(
        body=body,
        rid=rid,
        lora_ids=lora_ids,
        num_kept=len(task),
        prompts=prompts,
        samplings=samplings,
        grammars=grammars,
        heals=[
            isinstance(prompt, str) and heals(server, sampling, grammar)
            for prompt, sampling, grammar in zip(given.prompts, samplings, grammars, strict=True)
        ],
        is_list=given.is_list or samplings[0].n > 1,
        is_delta=is_delta,
        started=started,
        eos_ids=server.tokenizer.eos_token_ids,
        writer=LogprobWriter(server.tokenizer),
    )
