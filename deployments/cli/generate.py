"""`remora generate`: complete one prompt, over HTTP or offline, and print the text.

The prompt is sent verbatim, without a chat template; `remora chat` applies one.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated, Any

import typer

from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.cli.options import ApiKey
from remora.deployments.cli.terminal import Failure, answer


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to complete; - reads stdin.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Offline: folder, .gguf file or built-in model name. Default: the built-in model. "
            "With --url: name of a served model. Default: the first one served."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Server to use instead of a local engine.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum output tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature; 0 = greedy.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling: cumulative probability to keep.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample from the k likeliest; 0 = all.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Minimum probability, relative to the likeliest token's."),
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 = no penalty.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampler.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text. Repeatable.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Complete PROMPT and print the text."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise Failure("the prompt is empty")
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or None,
    }
    given = {name: value for name, value in sampling.items() if value is not None}
    if url is None:
        answer(_generate_offline(text, model or BUILTIN_MODEL, given))
        return
    from remora.deployments.cli.server_client import ServerClient  # imports httpx

    with closing(ServerClient(url, api_key=api_key)) as server:
        for piece in server.stream_completion(text, model=server.pick_model(model), **given):
            answer(piece, end="")
    answer("")


def _generate_offline(prompt: str, model: str, sampling: dict[str, Any]) -> str:
    from remora.engine.llm import LLM, SamplingParams

    if "stop" in sampling:
        sampling = {**sampling, "stop": tuple(sampling["stop"])}
    # Validate before the model loads, so that a wrong flag is reported at once.
    params = SamplingParams(**sampling)
    outputs = LLM(model=model).generate([prompt], params)
    return str(outputs[0].text)
