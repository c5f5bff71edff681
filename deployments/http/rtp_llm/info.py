"""RTP-LLM's /tokenizer/encode, /chat/render, /worker_status and /cache_status."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.chat import prepare_chat
from remora.deployments.http.generation.encoding import OFF_LOOP_CHARS
from remora.deployments.http.generation.endpoint import Endpoint, Job
from remora.deployments.http.generation.prompts import encode
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.rtp_llm.bodies import TokenizerEncodeBody
from remora.engine.types import SamplingParams


async def tokenizer_encode(server: ServerState, body: TokenizerEncodeBody) -> dict[str, Any]:
    """Return the tokens of a text, with their texts or with their places. Raises RequestError."""
    await server.model(body.model)
    text, tokenizer = body.prompt, server.tokenizer
    (ids,) = await encode(server, [text], add_special_tokens=True, param="prompt")
    answer: dict[str, Any] = {"token_ids": ids, "error": ""}
    if not body.return_offsets_mapping:
        return answer | {"tokens": [tokenizer.token_text(token_id) for token_id in ids]}
    places = await server.encoder.off_loop_if(
        len(text) > OFF_LOOP_CHARS, lambda: tokenizer.places(text)
    )
    return answer | {"tokens": [], "offset_mapping": places}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderJob(Job):
    """A conversation to show as the model gets it; nothing is generated."""

    answer: dict[str, Any]

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response."""
        return self.answer


async def prepare_render(server: ServerState, body: ChatBody, context: RequestContext) -> RenderJob:
    """Return the prompt and the parameters of a chat, checked as one. Raises RequestError."""
    chat = await prepare_chat(server, body, context)
    tokenizer, sampling = server.tokenizer, chat.sampling
    eos_ids = tokenizer.eos_token_ids
    answer = {
        "input_prompt": chat.prompt,
        "input_ids": list(chat.prompt_ids),
        "input_urls": [],
        "max_seq_len": server.plan.max_sequence_tokens,
        "eos_token_id": eos_ids[0] if eos_ids else None,
        "stop_word_ids_list": [[id_] for id_ in (*eos_ids, *sampling.stop_token_ids)],
        "stop_words_list": [*map(tokenizer.token_text, eos_ids), *sampling.stop],
        "renderer_info": {
            "renderer_model_type": chat.model.name,
            "template": tokenizer.template_source,
        },
        "generate_config": _config(sampling),
    }
    return RenderJob(context=context, requests=(), answer=answer)


def _config(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters by the names of `generate_config`."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "random_seed": sampling.seed,
        "num_beams": 1 if sampling.beams is None else sampling.beams.width,
        "num_return_sequences": sampling.n,
        "stop_words_str": list(sampling.stop),
        "stop_words_list": [[id_] for id_ in sampling.stop_token_ids],
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
    }


def worker_status(server: ServerState) -> dict[str, Any]:
    """Return the load of this replica. `available_concurrency` counts sequences."""
    plan, stats = server.plan, server.client.stats()
    num_open = stats.num_running + stats.num_waiting
    free = max(0, plan.max_open_sequences - num_open)
    return {
        "role": "RoleType.PDFUSION",
        "alive": not server.calls.is_draining,
        "available_concurrency": free,
        "frontend_available_concurrency": free,
        "running_query_len": stats.num_running,
        "waiting_query_len": stats.num_waiting,
        "step_latency_ms": stats.last_step_s * 1e3,
        "iterate_count": stats.steps_total,
        "dp_size": 1,
        "tp_size": plan.tp_size,
        "max_seq_len": plan.max_sequence_tokens,
        "max_batch_tokens_size": plan.max_step_tokens,
        "cache_status": cache_status(server),
    }


def cache_status(server: ServerState) -> dict[str, int]:
    """Return the KV memory in tokens; cached pages are available, since they can be evicted."""
    plan, stats = server.plan, server.client.stats()
    return {
        "available_kv_cache": (stats.num_pages - stats.num_held_pages) * plan.page_size,
        "total_kv_cache": stats.num_pages * plan.page_size,
        "block_size": plan.page_size,
    }


RTP_RENDER: Endpoint[ChatBody] = Endpoint(partial(parse, ChatBody), prepare_render)
