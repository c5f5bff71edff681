"""Whether a beam search fits an engine, and how long its outputs may be."""

from __future__ import annotations

from remora.configs.errors import InvalidRequest, InvalidSampling, PromptTooLong
from remora.configs.planning.plan import EnginePlan
from remora.engine.beams.pages import BeamPages, most_output_tokens
from remora.engine.types import Request


def check_beams(request: Request, plan: EnginePlan) -> None:
    """Raise InvalidRequest or PromptTooLong if a request's beam search can never run.

    Requests without beam search pass.
    """
    beams = request.sampling.beams
    if beams is None:
        return
    if plan.windows is not None:
        raise InvalidRequest(
            "Beam search does not work with a page pool for sliding-window layers, which this "
            "model has here; leave beam search out, or start the server with "
            'engine.window_pages: "off".',
            "num_beams",
        )
    if request.heal:
        raise InvalidRequest(
            "Token healing does not work together with beam search; leave one of them out.",
            "token_healing",
        )
    if beams.width > plan.max_running_requests:
        raise InvalidSampling(
            f"num_beams is {beams.width}; this server computes {plan.max_running_requests} outputs "
            "at a time (engine.max_running_requests).",
            "num_beams",
        )
    most = _most_tokens(request, plan)
    wanted = request.sampling.max_tokens or 1
    if wanted > most:
        raise PromptTooLong(
            f"{beams.width} beams of {wanted} tokens after a prompt of {len(request.prompt_ids)} "
            f"need more than the KV memory, which holds {plan.kv_tokens} tokens: outputs of "
            f"{max(0, most)} tokens fit. Use fewer beams, or lower max_tokens.",
            "max_tokens",
        )


def beams_for(request: Request, max_tokens: int, plan: EnginePlan) -> tuple[int, BeamPages]:
    """Return the longest output of a request's beams, and their pages.

    max_tokens:  that its context allows
    """
    beams, num_prompt = request.sampling.beams, len(request.prompt_ids)
    assert beams is not None
    longest = min(max_tokens, _most_tokens(request, plan))
    return longest, BeamPages(
        width=beams.width,
        num_prompt_tokens=num_prompt,
        max_tokens=longest,
        page_size=plan.page_size,
    )


def _most_tokens(request: Request, plan: EnginePlan) -> int:
    beams = request.sampling.beams
    assert beams is not None
    return most_output_tokens(len(request.prompt_ids), beams.width, plan.num_pages, plan.page_size)
