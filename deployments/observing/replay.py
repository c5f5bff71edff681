"""Runs token ids from a file when a replica starts, to make comparable tensor dumps."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import orjson

from remora.configs.errors import ConfigError
from remora.engine.protocols import EngineClient
from remora.engine.types import Request, SamplingParams

_KEY = "debug.tensor_dump_input"


def read_ids(path: str) -> list[int]:
    """Return the token ids in a file. Raises ConfigError."""
    try:
        found = orjson.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{_KEY}: {path} cannot be read ({error.strerror})") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{_KEY}: {path} is not JSON: {error}") from None
    is_ids = isinstance(found, list) and all(type(token) is int for token in found)
    if not is_ids or not found:
        raise ConfigError(f"{_KEY}: {path} must contain a list of token ids")
    return list(found)


async def replay(client: EngineClient, path: str | None) -> None:
    """Run the ids in a file and generate one token; None does nothing. Raises ConfigError."""
    if path is None:
        return
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = Request(request_id="replay", prompt_ids=read_ids(path), sampling=sampling)
    async with aclosing(client.generate(request)) as outputs:
        async for _ in outputs:
            pass
    await client.flush_cache()
