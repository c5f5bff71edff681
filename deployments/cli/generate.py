"""`remora generate`: continue one prompt, over HTTP or offline, and print the text.

The prompt is continued as it is, without a chat template; `remora chat` applies one.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.cli.bench_options import ApiKey
from remora.deployments.cli.server_client import ServerClient
from remora.deployments.cli.terminal import Failure, answer


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Offline: folder, .gguf file or built-in name (default: the built-in model). "
            "With --url: name of a served model (default: its first)."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Ask this server instead of loading.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of output.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 = always the likeliest.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus: the likeliest, to this sum.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Only the k likeliest; 0 = all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="At least this share of the likeliest.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 = none.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; repeat for more.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Continue PROMPT and print what comes."""
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
    with ServerClient(url, api_key=api_key) as server:
        for piece in server.stream_completion(text, model=server.pick_model(model), **given):
            answer(piece, end="")
    answer("")


def _generate_offline(prompt: str, model: str, sampling: dict[str, Any]) -> str:
    from remora.engine.llm import LLM, SamplingParams

    if "stop" in sampling:
        sampling = {**sampling, "stop": tuple(sampling["stop"])}
    # Validated before the model loads: a wrong flag is answered at once.
    params = SamplingParams(**sampling)
    outputs = LLM(model=model).generate([prompt], params)
    return str(outputs[0].text)
