"""Prompts: from texts, messages and ids to token ids within the model's context.

Long inputs are tokenised off the event loop. A text whose length in characters shows that it cannot
fit is refused before it is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.configs.planning.plan import EnginePlan
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import OpenAIBody
from remora.deployments.http.generation.bodies import PromptInput, TemplateBody
from remora.deployments.http.generation.encoding import OFF_LOOP_CHARS
from remora.deployments.http.generation.messages import OWN_ROLES, Message
from remora.deployments.http.generation.reasoning import template_variables
from remora.deployments.http.generation.sampling import check_vocabulary
from remora.deployments.http.generation.tools import template_tools, tool_use_of
from remora.deployments.http.prompt_embeddings.prompts import SentEmbeddings, read_embeddings
from remora.engine.embeddings import PromptEmbeddings

if TYPE_CHECKING:
    from remora.deployments.http.generation.server_state import ServerState
    from remora.engine.tokens.tokenizer import Tokenizer

# Tokens near a cut may differ from those of the whole text, so this many more are computed and
# then dropped.
_CUT_MARGIN_TOKENS = 64

Side = Literal["head", "center", "tail"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How many tokens of a prompt are kept, and which side is dropped."""

    num_tokens: int
    drops: Side = "head"

    def of(self, ids: list[int]) -> list[int]:
        """Return the ids that are kept."""
        if len(ids) <= self.num_tokens:
            return ids
        first, last = self._kept(self.num_tokens)
        return ids[:first] + ids[len(ids) - last :]

    def of_text(self, text: str, tokenizer: Tokenizer) -> str:
        """Return a part of a text that is sure to hold the kept tokens."""
        first, last = self._kept(self.num_tokens)
        margin = _CUT_MARGIN_TOKENS
        first_chars = (first + margin) * tokenizer.max_token_chars if first else 0
        last_chars = (last + margin) * tokenizer.max_token_chars if last else 0
        if len(text) <= first_chars + last_chars:
            return text
        return text[:first_chars] + text[len(text) - last_chars :]

    def _kept(self, num_tokens: int) -> tuple[int, int]:
        """Return how many tokens are kept at the beginning and at the end."""
        first = {"head": 0, "center": num_tokens // 2, "tail": num_tokens}[self.drops]
        return first, num_tokens - first


def usual_cut(server: ServerState, max_tokens: int | None) -> Cut | None:
    """Return the operator's truncation of prompts that leave no room for the output, if any."""
    drops = server.config.api.prompt_truncation
    return None if drops == "none" else Cut(_room(server.plan, max_tokens), drops)


def cut_of(body: OpenAIBody, server: ServerState, max_tokens: int | None) -> Cut | None:
    """Return the truncation of a body's prompts, if any. Raises InvalidRequest."""
    wanted, plan = body.truncate_prompt_tokens, server.plan
    if wanted is None:
        if body.truncation_side is not None:
            message = "truncation_side needs truncate_prompt_tokens."
            raise InvalidRequest(message, "truncation_side")
        return usual_cut(server, max_tokens)
    if wanted == 0 or wanted > plan.max_sequence_tokens:
        message = (
            f"truncate_prompt_tokens is {wanted}; it must lie between 1 and "
            f"{plan.max_sequence_tokens}, or be -1: as many as fit."
        )
        raise InvalidRequest(message, "truncate_prompt_tokens")
    drops: Side = "tail" if body.truncation_side == "right" else "head"
    return Cut(_room(plan, max_tokens) if wanted < 0 else wanted, drops)


def _room(plan: EnginePlan, max_tokens: int | None) -> int:
    """Return the length of the longest prompt that leaves room for the output."""
    return max(1, plan.max_sequence_tokens - (1 if max_tokens is None else max_tokens))


async def encode(
    server: ServerState,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    param: str,
    cut: Cut | None = None,
) -> list[list[int]]:
    """Return the ids of each text. Raises PromptTooLong."""
    if cut is not None:
        texts = [cut.of_text(text, server.tokenizer) for text in texts]
    else:
        for text in texts:
            _check_chars(len(text), server, param)
    all_ids = await server.encoder.encode(texts, add_special_tokens=add_special_tokens)
    return all_ids if cut is None else [cut.of(ids) for ids in all_ids]


async def render(
    server: ServerState, messages: list[Message], options: TemplateBody, *, is_cut: bool = False
) -> str:
    """Return a conversation as rendered by the model's chat template.

    is_cut:  whether a prompt that is too long is truncated instead of refused

    Raises InvalidRequest and PromptTooLong.
    """
    tokenizer = server.tokenizer
    tools = template_tools(tool_use_of(options))
    documents = options.documents or None
    api = server.config.api
    own = template_variables(tokenizer, options, api.reasoning_efforts)
    variables = {**api.template_variables, **own}
    num_chars = sum(message.num_chars for message in messages)
    num_chars += sum(len(str(given)) for given in (tools, documents) if given)
    if not is_cut:
        _check_chars(num_chars, server, "messages")

    def work() -> str:
        return tokenizer.render_chat(
            [message.as_template_message() for message in messages],
            add_generation_prompt=options.wants_generation_prompt,
            continue_final_message=bool(options.continue_final_message),
            tools=tools,
            documents=documents,
            template_kwargs=variables,
        )

    try:
        prompt = await server.encoder.off_loop_if(num_chars > OFF_LOOP_CHARS, work)
    except InvalidRequest as error:
        param = error.param or "messages"
        raise InvalidRequest(error.message, param, error.code, limit=error.limit) from None
    _check_roles(messages, prompt)
    return prompt


def _check_roles(messages: Sequence[Message], prompt: str) -> None:
    """Raise InvalidRequest for a role that the template passes over instead of refusing it."""
    for number, message in enumerate(messages):
        if message.role not in OWN_ROLES and (message.content or "").strip() not in prompt:
            name = f"messages[{number}].role"
            text = f"{name}: this model's chat template has no messages of the role {message.role}."
            raise InvalidRequest(text, name)


async def prompt_ids(
    server: ServerState,
    prompts: Sequence[PromptInput | PromptEmbeddings],
    *,
    add_special_tokens: bool,
    param: str,
    cut: Cut | None = None,
    before: list[int] | None = None,
) -> list[list[int]]:
    """Return the ids of each prompt, given as text, ids or embeddings, which are not truncated.

    before:  ids put before each prompt, with the special tokens of the beginning

    Raises InvalidRequest and PromptTooLong.
    """
    if before:
        add_special_tokens = False
        cut = None if cut is None else replace(cut, num_tokens=max(1, cut.num_tokens - len(before)))
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(
        await encode(server, texts, add_special_tokens=add_special_tokens, param=param, cut=cut)
    )
    all_ids = [
        next(encoded) if isinstance(prompt, str) else _given_ids(prompt, cut) for prompt in prompts
    ]
    for prompt, ids in zip(prompts, all_ids, strict=True):
        if not ids:
            raise InvalidRequest(f"{param} is empty; at least one token is needed.", param)
        # A longer list is refused for its length, so its ids need no check.
        if not isinstance(prompt, str) and len(ids) <= server.plan.max_sequence_tokens:
            check_vocabulary(ids, server.tokenizer.vocab_size, param)
    if not before:
        return all_ids
    start = server.tokenizer.encode("", add_special_tokens=True)
    return [_joined(before, ids, start) for ids in all_ids]


async def given_embeddings(
    server: ServerState, sent: SentEmbeddings, param: str
) -> list[PromptEmbeddings]:
    """Return the embeddings that a body has instead of texts. Raises InvalidRequest."""
    if not server.config.api.prompt_embeddings:
        message = (
            f"{param}: prompts given as embeddings are off; send text or token ids, or set "
            "api.prompt_embeddings."
        )
        raise unsupported(param, message)
    return await server.encoder.off_loop_if(
        sent.size > OFF_LOOP_CHARS, lambda: read_embeddings(sent, server.plan, param)
    )


def _given_ids(prompt: list[int] | PromptEmbeddings, cut: Cut | None) -> list[int]:
    if isinstance(prompt, PromptEmbeddings):
        return prompt.ids
    return prompt if cut is None else cut.of(prompt)


def _joined(before: list[int], ids: list[int], start: list[int]) -> list[int]:
    """Join ids; `start`, with which plain texts begin, is not repeated (templates write it too)."""
    is_doubled = before[: len(start)] == start == ids[: len(start)]
    return before + (ids[len(start) :] if is_doubled else ids)


def check_room(num_prompt: int, max_tokens: int | None, plan: EnginePlan, param: str) -> None:
    """Raise PromptTooLong if prompt and output cannot fit the context or the KV memory."""
    limit = plan.max_sequence_tokens
    total = num_prompt + (1 if max_tokens is None else max_tokens)
    if total <= limit:
        return
    what = "context length" if limit == plan.max_model_len else "sequence length (KV memory)"
    output = "at least 1" if max_tokens is None else str(max_tokens)
    message = (
        f"This model's maximum {what} is {limit} tokens. However, you requested {total} tokens "
        f"({num_prompt} in the {param}, {output} in the completion), {total - limit} too many. "
        f"Please reduce the length of the {param} or completion."
    )
    raise PromptTooLong(message, param, num_tokens=num_prompt, max_tokens=limit)


def _check_chars(num_chars: int, server: ServerState, param: str) -> None:
    limit = server.plan.max_sequence_tokens
    if num_chars > limit * server.tokenizer.max_token_chars:
        message = (
            f"This model's maximum context length is {limit} tokens. However, the {param} has "
            f"{num_chars} characters, which is more than {limit} tokens can hold. "
            f"Please reduce the length of the {param}."
        )
        raise PromptTooLong(message, param)
