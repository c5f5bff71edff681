"""Replies of an API, whole and streamed, compared byte for byte with its `golden.json`.

A change there is a change for every client. Ids, times, fingerprints and drawn seeds are replaced.
REMORA_WRITE_GOLDEN=1 writes what the server replies now; read the difference before it is kept.
"""

from __future__ import annotations

import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import httpx

IDS = re.compile(r"\b(call|resp|msg|fc|rs|toolu)_[0-9a-f]{16,}")
INDEX = re.compile(r'"index":(\d+)')
TIMES_AND_SEEDS = re.compile(
    r'("(?:created|created_at|completed_at|e2e_latency|[a-z_]+_duration|seed|system_fingerprint)":)'
    r'("[^"]*"|[-+.e\d]+)'
)
write_line = partial(json.dumps, ensure_ascii=False)


def check_golden(folder: Path, name: str, response: httpx.Response) -> None:
    """Compare a reply with the entry `name` of the golden file in `folder`."""
    assert response.status_code == 200, response.text
    path = folder / "golden.json"
    if os.environ.get("REMORA_WRITE_GOLDEN"):
        kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(written(kept | {name: parts_of(response)}), "utf-8")
    assert parts_of(response) == json.loads(path.read_text("utf-8"))[name]


def parts_of(response: httpx.Response) -> list[Any]:
    """Return the media type, then the body or each event as {prefix of its frame: data}."""
    media_type, text = response.headers["content-type"], normal(response.text)
    if not media_type.startswith("text/event-stream"):
        return [media_type, *map(json.loads, text.splitlines())]
    assert text.endswith("\n\n")
    frames = text.split("\n\n")[:-1]
    if not text.startswith("event: "):  # the events of several replies come in any order
        frames.sort(key=index_of)
    return [media_type, *map(event_of, frames)]


def index_of(frame: str) -> float:
    """Return the index of the reply that an event belongs to; infinity if it belongs to all."""
    match = INDEX.search(frame)
    return int(match[1]) if match else math.inf


def event_of(frame: str) -> Any:
    prefix, brace, data = frame.partition("{")
    return {prefix: json.loads(brace + data)} if brace else frame


def normal(text: str) -> str:
    """Number the random ids of a reply, and set its times and drawn seeds to zero."""
    numbers: dict[str, str] = {}
    for match in IDS.finditer(text):
        numbers.setdefault(match[0], f"{match[1]}_{len(numbers)}")
    return TIMES_AND_SEEDS.sub(r"\1 0", IDS.sub(lambda match: numbers[match[0]], text))


def written(kept: dict[str, list[Any]]) -> str:
    """Return the text of a golden file: one line for each part of a reply."""
    entries = [
        f"{write_line(name)}: [\n" + ",\n".join(map(write_line, parts)) + "\n]"
        for name, parts in sorted(kept.items())
    ]
    return "{\n" + ",\n".join(entries) + "\n}\n"
