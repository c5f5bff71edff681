"""One answer out of those of several replicas or models. Pure."""

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
# Paths at which every replica of every model is asked.
EVERYWHERE = frozenset({"/flush_cache", "/abort_request", "/metrics", "/health_generate"})
_SAMPLE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole answer of one replica."""

    replica: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def no_answer(replica: str = "") -> Whole:
    """Return what stands for the answer of a replica that gave none."""
    error = OPENAI.error(Unavailable("A replica did not answer. Please try again."))
    return Whole(replica, 503, (("content-type", "application/json"),), dumps(error))


def merge_lists(field: str, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Return the first answer with the lists of all; an empty list where there is no answer."""
    answers: list[dict[str, Any]] = [orjson.loads(body) for body in bodies]
    first = answers[0] if answers else {}
    return first | {field: [item for answer in answers for item in answer[field]]}


def merge_metrics(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Return Prometheus' texts as one, each sample with its replica's label.

    texts:  (replica, text); an empty replica adds no label
    """
    families: dict[bytes, list[bytes]] = {}
    for replica, text in texts:
        label = b"" if not replica else b'replica="%s"' % replica.encode()
        about: list[bytes] = []
        for line in text.splitlines():
            if line.startswith(b"#"):
                about = families.setdefault(line.split(b" ")[2], [])
                if line not in about:
                    about.append(line)
            elif line:
                about.append(_labelled(line, label))
    return b"".join(line + b"\n" for lines in families.values() for line in lines)


def _labelled(sample: bytes, label: bytes) -> bytes:
    match = _SAMPLE.fullmatch(sample)
    if match is None or not label:
        return sample
    name, brace, rest = match.groups()
    return name + b"{" + label + (b"," + rest if brace else b"}" + rest)


def worst(answers: Sequence[Whole]) -> Whole:
    """Return the answer that says most of what went wrong."""
    return max(answers, key=lambda answer: answer.status)


def merge(path: str, answers: Sequence[Whole]) -> Whole:
    """Return what a client is told when all of these were asked."""
    said = worst(answers)
    if said.status >= 400:
        return said
    if path == "/metrics":
        body = merge_metrics((answer.replica, answer.body) for answer in answers)
    elif path == "/abort_request":
        num = sum(orjson.loads(answer.body)["num_aborted"] for answer in answers)
        body = orjson.dumps({"num_aborted": num})
    else:
        body = said.body
    return Whole(said.replica, said.status, said.headers, body)
