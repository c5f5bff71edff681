"""vLLM's /generative_scoring: the probability of the first label after a query and each item.

Made by the endpoint of SGLang's /v1/score, which has the probabilities of all labels.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import Body, Label
from remora.deployments.http.generation.endpoint import Endpoint, Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState


class GenerativeScoringBody(Body):
    """Body of /generative_scoring. `query` and `items` are validated by the inner endpoint."""

    query: Any
    items: Any
    label_token_ids: Any
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Label | None = None
    request_id: Label | None = None
    user: str | None = None


class GenerativeScorer:
    """Prepares the jobs.

    scores:  the endpoint of SGLang's bodies of /v1/score
    """

    def __init__(self, scores: Endpoint[Any]) -> None:
        self._scores = scores

    async def prepare(
        self, server: ServerState, body: GenerativeScoringBody, context: RequestContext
    ) -> Job:
        """Return the job of a body. Raises RequestError."""
        if body.add_special_tokens is False:
            raise unsupported(
                "add_special_tokens", "add_special_tokens: prompts begin as the tokenizer has it."
            )
        fields = {
            name: getattr(body, name)
            for name in ("query", "items", "label_token_ids", "item_first", "model", "priority")
        }
        fields |= {
            "apply_softmax": body.apply_softmax is not False,
            "cache_salt": body.cache_salt,
        }

        def converted(answer: Any) -> dict[str, Any]:
            data = [
                {"index": index, "object": "score", "score": scores[0]}
                for index, scores in enumerate(answer["scores"])
            ]
            num_prompt = answer["usage"]["prompt_tokens"]
            return {
                "id": f"generative-scoring-{context.request_id}",
                "object": "list",
                "created": context.created,
                "model": answer["model"],
                "data": data,
                "usage": {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": len(data),
                    "total_tokens": num_prompt + len(data),
                },
            }

        return await self._scores.convert(server, fields, context, converted)
