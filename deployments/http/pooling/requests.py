"""Shared by the routes of pooling models: inputs become rows, and rows become engine requests.

Long texts are tokenised off the event loop. Texts are framed as the model expects, and truncated
only if the request or `api.prompt_truncation` asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora.configs.errors import InvalidRequest, PromptTooLong, Unavailable
from remora.configs.sections.pooling import Task
from remora.deployments.http.generation.bodies import PromptInput
from remora.deployments.http.generation.encoding import OFF_LOOP_CHARS
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.sampling import check_vocabulary
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.pooling.fields import (
    ChatMessage,
    ConversationBody,
    PoolingBaseBody,
)
from remora.engine.pooling.facts import PoolingFacts
from remora.engine.pooling.row import Row
from remora.engine.pooling.texts import Framer, Side, cut
from remora.engine.types import FloatArray, PoolingParams, Request, SamplingParams

NO_TEXT = SamplingParams(max_tokens=1)
POOLED = PoolingParams()
OFF_LOOP_NUMBERS = 65_536  # of one answer
SCORING: tuple[Task, ...] = ("classify", "rerank", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingJob(Job):
    """A validated pooling request.

    tell:  converts the model's results, one per row, to the answer
    """

    tell: Callable[[list[FloatArray]], Any]

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt tokens."""
        return sum(len(request.prompt_ids) for request in self.requests)

    async def result(self, outputs: OutputStream) -> Any:
        """Return the complete answer."""
        found: dict[int, FloatArray] = {}
        async for index, output in outputs:
            if output.pooled is None:
                raise Unavailable("The request was aborted before it was computed.")
            found[index] = output.pooled
        results = [found[index] for index in range(len(self.requests))]
        if sum(result.size for result in results) > OFF_LOOP_NUMBERS:
            return await asyncio.to_thread(self.tell, results)
        return self.tell(results)


def facts_of(server: ServerState, *tasks: Task) -> PoolingFacts:
    """Return the facts of the model. Raises InvalidRequest unless its task is one of `tasks`."""
    if server.pooling is None:
        raise InvalidRequest(
            "This server's model generates text. Embeddings and scores come from a server whose "
            "model.task is embed, classify, rerank or reward.",
            code="not_offered",
        )
    facts = server.pooling.facts
    if facts.task not in tasks:
        raise InvalidRequest(
            f"This server's model is for the task {facts.task}; this route needs "
            f"{' or '.join(tasks)} (model.task).",
            code="not_offered",
        )
    return facts


def job_of(
    context: RequestContext,
    body: PoolingBaseBody,
    rows: Sequence[Row],
    tell: Callable[[list[FloatArray]], Any],
    *,
    params: PoolingParams = POOLED,
) -> PoolingJob:
    """Return the job that computes the rows."""
    return PoolingJob(
        context=context,
        tell=tell,
        requests=tuple(
            Request(
                request_id=context.request_id,
                prompt_ids=row.token_ids,
                sampling=NO_TEXT,
                priority=body.priority or 0,
                pooling=replace(params, second=row.second),
            )
            for row in rows
        ),
    )


async def rows_of(
    server: ServerState,
    body: PoolingBaseBody,
    inputs: Sequence[PromptInput],
    *,
    param: str,
    before: str = "",
) -> list[Row]:
    """Return the row of each input.

    before:  prefix of each text; token ids have no prefix
    Raises InvalidRequest and PromptTooLong.
    """
    max_tokens, drops = cut_of(server, body)
    check_filled(inputs, param)
    texts = [before + given for given in inputs if isinstance(given, str)]
    check_chars(server, texts, param, is_cut=max_tokens is not None)
    framed: list[Row] = []
    if texts:
        framer, is_framed = framer_of(server, param), body.add_special_tokens is not False
        framed = await server.encoder.off_loop_if(
            sum(map(len, texts)) > OFF_LOOP_CHARS,
            lambda: framer.rows(texts, max_tokens=max_tokens, drops=drops, is_framed=is_framed),
        )
    in_turn = iter(framed)
    rows = []
    for given in inputs:
        if isinstance(given, str):
            rows.append(next(in_turn))
            continue
        check_vocabulary(given[: server.plan.max_sequence_tokens], vocab_size(server), param)
        rows.append(Row(given if max_tokens is None else cut(given, max_tokens, drops)))
    return check_rows(server, rows, param, max_tokens)


def check_filled(inputs: Sequence[PromptInput], param: str) -> None:
    """Raise InvalidRequest for an empty text: what is around it would be embedded instead."""
    for index, given in enumerate(inputs):
        if given == "":
            name = param if len(inputs) == 1 else f"{param}[{index}]"
            raise InvalidRequest(f"{name} is an empty text; send texts with content.", param)


def framer_of(server: ServerState, param: str) -> Framer:
    """Return the framer that converts texts to rows. Raises InvalidRequest without tokenizer."""
    framer = None if server.pooling is None else server.pooling.framer
    if framer is None:
        message = "This server has no tokenizer (model.skip_tokenizer): send token ids."
        raise InvalidRequest(message, param, "no_tokenizer")
    return framer


def vocab_size(server: ServerState) -> int:
    """Return the size of the vocabulary."""
    return server.tokenizer.vocab_size


def check_rows(
    server: ServerState, rows: list[Row], param: str, max_tokens: int | None = None
) -> list[Row]:
    """Return the rows. Raises InvalidRequest for an empty row, PromptTooLong for a long row.

    max_tokens:  truncation limit of the rows; a row may exceed it, since its frame is kept
    """
    server.calls.check_size(len(rows), param)
    limit = server.plan.max_sequence_tokens
    for row in rows:
        if max_tokens is not None and len(row.token_ids) > max_tokens:
            raise PromptTooLong(
                f"An entry of {param} still has {len(row.token_ids)} tokens when it is cut as far "
                f"as it can be, for what stands around it is kept; {max_tokens} are allowed.",
                param,
            )
        if not row.token_ids:
            raise InvalidRequest(f"{param} is empty; at least one token is needed.", param)
        if len(row.token_ids) > limit:
            raise PromptTooLong(_too_long(limit, f"{len(row.token_ids)} tokens", param), param)
    return rows


def check_chars(server: ServerState, texts: Sequence[str], param: str, *, is_cut: bool) -> None:
    """Raise PromptTooLong for a text that cannot fit, before it is tokenised."""
    limit = server.plan.max_sequence_tokens
    for text in texts:
        if not is_cut and len(text) > limit * server.tokenizer.max_token_chars:
            raise PromptTooLong(_too_long(limit, f"{len(text)} characters", param), param)


def _too_long(limit: int, found: str, param: str) -> str:
    return (
        f"This model's maximum context length is {limit} tokens. However, an entry of {param} has "
        f"{found}. Please reduce its length, or ask for truncation by truncate_prompt_tokens."
    )


def cut_of(server: ServerState, body: PoolingBaseBody) -> tuple[int | None, Side]:
    """Return the truncation of a body: the number of tokens kept, and the side that is cut off.

    None as the number means that longer rows are refused. Raises InvalidRequest.
    """
    limit, wanted = server.plan.max_sequence_tokens, body.truncate_prompt_tokens
    drops: Side = "head" if body.truncation_side == "left" else "tail"
    if wanted is None:
        usual = server.config.api.prompt_truncation
        if usual == "none":
            if body.truncation_side is not None:
                message = "truncation_side needs truncate_prompt_tokens."
                raise InvalidRequest(message, "truncation_side")
            return None, drops
        if body.truncation_side is None:
            drops = "head" if usual == "head" else "tail"
        return limit, drops
    if wanted == 0 or wanted > limit:
        message = (
            f"truncate_prompt_tokens is {wanted}; it must lie between 1 and {limit}, or be -1: as "
            "many as fit."
        )
        raise InvalidRequest(message, "truncate_prompt_tokens")
    return (limit if wanted < 0 else wanted), drops


async def chat_rows(
    server: ServerState, body: ConversationBody, messages: Sequence[ChatMessage], *, param: str
) -> list[Row]:
    """Return the row of a conversation, rendered by the model's template."""
    max_tokens, drops = cut_of(server, body)
    given = [{"role": message.role, "content": message.content} for message in messages]
    text = "".join(each["content"] for each in given)
    check_chars(server, [text], param, is_cut=max_tokens is not None)

    def work() -> list[int]:
        written = server.tokenizer.render_chat(
            given,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs or {},
        )
        special = bool(body.add_special_tokens)
        ids = server.tokenizer.encode(written, add_special_tokens=special)
        return ids if max_tokens is None else cut(ids, max_tokens, drops)

    ids = await server.encoder.off_loop_if(len(text) > OFF_LOOP_CHARS, work)
    return check_rows(server, [Row(ids)], param)


def usage_of(rows: Sequence[Row]) -> dict[str, int]:
    """Return the usage: the number of tokens of all rows."""
    num_tokens = sum(len(row.token_ids) for row in rows)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def activation_of(facts: PoolingFacts, body: PoolingBaseBody) -> str:
    """Return the activation of a body's scores."""
    return "none" if body.use_activation is False else facts.activation
