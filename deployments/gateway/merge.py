"""Merges the answers of several replicas or models into one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from remora.configs.errors import Unavailable
from remora.deployments.http.core.wire import dumps
from remora.deployments.http.core.wire_formats import OPENAI

# Paths whose answers are lists of models, and the field that holds the list.
LISTS: Mapping[str, str] = {"/v1/models": "data", "/api/tags": "models", "/api/ps": "models"}
# Paths that are sent to every replica of every model.
EVERYWHERE = frozenset(
    {
        "/flush_cache",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/pause",
        "/resume",
        "/metrics",
        "/health_generate",
        "/load",
    }
)
# Of these, the paths whose answers are counts, and the field that holds the count.
_COUNTS: Mapping[str, str] = {"/abort_request": "num_aborted", "/load": "server_load"}
_SAMPLE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer of one replica."""

    replica: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def no_answer(replica: str = "") -> WholeAnswer:
    """Return the answer that replaces a missing one."""
    error = OPENAI.error(Unavailable("A replica did not answer. Please try again."))
    return WholeAnswer(replica, 503, (("content-type", "application/json"),), dumps(error))


def merge_lists(field: str, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Return the first answer with the lists of all; an empty list if there is none."""
    answers: list[dict[str, Any]] = [orjson.loads(body) for body in bodies]
    first = answers[0] if answers else {}
    return first | {field: [item for answer in answers for item in answer[field]]}


def merge_metrics(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Merge Prometheus texts; each sample gets a `replica` label.

    texts:  (replica, text); an empty replica adds no label
    """
    families: dict[bytes, list[bytes]] = {}
    for replica, text in texts:
        label = b"" if not replica else b'replica="%s"' % replica.encode()
        family: list[bytes] = []
        for line in text.splitlines():
            if line.startswith(b"#"):
                family = families.setdefault(line.split(b" ")[2], [])
                if line not in family:
                    family.append(line)
            elif line:
                family.append(_labelled(line, label))
    return b"".join(line + b"\n" for lines in families.values() for line in lines)


def _labelled(sample: bytes, label: bytes) -> bytes:
    match = _SAMPLE.fullmatch(sample)
    if match is None or not label:
        return sample
    name, brace, rest = match.groups()
    return name + b"{" + label + (b"," + rest if brace else b"}" + rest)


def merge(path: str, answers: Sequence[WholeAnswer]) -> WholeAnswer:
    """Return one answer to a request that was sent to all of these; an error wins."""
    first = max(answers, key=lambda answer: answer.status)
    if first.status >= 400:
        return first
    if path == "/metrics":
        body = merge_metrics((answer.replica, answer.body) for answer in answers)
    elif path in _COUNTS:
        field = _COUNTS[path]
        body = orjson.dumps({field: sum(orjson.loads(answer.body)[field] for answer in answers)})
    else:
        body = first.body
    return WholeAnswer(first.replica, first.status, first.headers, body)
