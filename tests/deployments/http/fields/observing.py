"""What each field of a request body does: an effect, a refusal, or nothing, as documented.

A table has a row for each field of an API's body, also of objects within it. A field is named by
its place, such as `tools[0].function.name`. The row says how a value of the field is seen:

    effect   what the engine is asked, what the template renders, or the answer differs
    refused  the request fails with 4xx, and the error names the field
    hint     nothing differs, unless that the answer repeats the field; the API's row in
             docs/http-api.md, "Hints without effect", lists it
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import httpx

from remora.deployments.http.core.fields import Body
from remora.engine.types import Request
from tests.deployments.fakes import FakeServer, client_of, share_app
from tests.deployments.http.conformance import content_of

DOCS = Path(__file__).parents[4] / "docs" / "http-api.md"
REASONED = "<think>Hm.</think>Paris."
HEADERS = {"x-request-id": "r1"}
# Answers of two equal requests differ in these.
_TIMES = frozenset(
    ("created", "created_at", "completed_at", "total_duration", "load_duration", "eval_duration",
     "prompt_eval_duration", "timings", "e2e_latency", "time_to_first_token", "queue_time", "seed")
)  # fmt: skip
_OWN_NUMBER = re.compile(r"#\d+")  # that each request of the engine has after its name
_RANDOM = re.compile(r"\b(call_|toolu_|rs_|msg_|fc_|ctc_|resp_|cmp_)[0-9A-Za-z]{8,}")
Kind = Literal["effect", "refused", "hint"]


class Row(NamedTuple):
    """How a field is seen.

    value:  of the field
    needs:  values of other fields, by place, in the body with the field and in the one without
    says:   what the model answers
    then:   path of a GET whose answer counts, too
    named:  what an error names instead of the field
    """

    kind: Kind
    value: Any
    needs: Mapping[str, Any] = {}
    says: str = REASONED
    then: str | None = None
    named: str | None = None


def effect(value: Any, needs: Mapping[str, Any] = {}, **options: Any) -> Row:
    """Return the row of a field that changes something."""
    return Row("effect", value, needs, **options)


def refused(value: Any, needs: Mapping[str, Any] = {}, *, named: str | None = None) -> Row:
    """Return the row of a field whose use is an error."""
    return Row("refused", value, needs, named=named)


def hint(value: Any, needs: Mapping[str, Any] = {}, **options: Any) -> Row:
    """Return the row of a field that changes nothing."""
    return Row("hint", value, needs, **options)


Rows = Mapping[str, Row]


def within(place: str, rows: Rows, *, needs: Mapping[str, Any] = {}) -> dict[str, Row]:
    """Return the rows of an object within a body: `place` precedes each field's.

    needs:  values in the whole body that all rows need
    """
    moved = {}
    for name, row in rows.items():
        inner = {f"{place}.{other}": value for other, value in row.needs.items()}
        moved[f"{place}.{name}"] = row._replace(needs={**needs, **inner})
    return moved


@dataclass(frozen=True)
class Api:
    """An API's body, an example of it, and a row for each of its fields.

    title:  of the API in the list of hints, if it is not its path
    """

    model: type[Body]
    path: str
    body: Mapping[str, Any]
    rows: Rows
    server: FakeServer = field(default_factory=FakeServer)
    title: str = ""


# -- places in bodies ---------------------------------------------------------------------------


def _objects_in(annotation: Any) -> Iterator[tuple[str, type[Body]]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield "", annotation
    step = "[0]" if get_origin(annotation) is list else ""
    for inner in get_args(annotation):
        yield from ((step + place, model) for place, model in _objects_in(inner))


def models_in(model: type[Body]) -> set[type[Body]]:
    """Return the model of a body, and those of all objects within it."""
    found, left = set(), [model]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            for info in one.model_fields.values():
                left += [inner for _, inner in _objects_in(info.annotation)]
    return found


def fields_of(model: type[Body]) -> Iterator[str]:
    """Yield the places of all fields that are no objects with fields of their own."""
    for name, info in model.model_fields.items():
        place = info.alias or name
        objects = list(_objects_in(info.annotation))
        if not objects:
            yield place
        for step, inner in objects:
            yield from (f"{place}{step}.{rest}" for rest in fields_of(inner))


def with_value(body: Mapping[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a copy of a body that has a value at a place; missing objects are made."""
    changed = copy.deepcopy(dict(body))
    steps: list[str | int] = [
        int(step) if step.isdecimal() else step for step in re.findall(r"[^.\[\]]+", place)
    ]
    at: Any = changed
    for step, following in pairwise(steps):
        made: Any = [] if isinstance(following, int) else {}
        if isinstance(at, list):
            at.extend([made] if step == len(at) else [])
            at = at[int(step)]
        else:
            if not isinstance(at.get(step), type(made)):
                at[step] = made
            at = at[step]
    at[steps[-1]] = copy.deepcopy(value)
    return changed


# -- what a request does ------------------------------------------------------------------------


def _comparable(value: Any) -> Any:
    """Return an answer without times and random names."""
    if isinstance(value, dict):
        return {k: _comparable(v) for k, v in value.items() if k not in _TIMES}
    if isinstance(value, list):
        return [_comparable(one) for one in value]
    return _RANDOM.sub(r"\1", value) if isinstance(value, str) else value


def _as_asked(request: Request, body: Mapping[str, Any]) -> Request:
    """Return a request of the engine without its number, and without a seed of the server."""
    seed = request.sampling.seed
    is_own = seed is not None and str(seed) not in json.dumps(body)
    return replace(
        request,
        request_id=_RANDOM.sub(r"\1", _OWN_NUMBER.sub("", request.request_id)),
        grammar=None,
        sampling=replace(request.sampling, seed=None) if is_own else request.sampling,
    )


class Seen(NamedTuple):
    """What one request did."""

    status: int
    asked: list[Any]
    rendered: list[Any]
    answer: Any
    ignored: str | None


async def observe(
    client: httpx.AsyncClient, server: Any, api: Api, body: Mapping[str, Any], row: Row
) -> Seen:
    """Send a body and return what it did. `server`: with the parts of a FakeServer."""
    engine = server.client
    engine.text = row.says
    engine.requests.clear()
    server.grammars.asked.clear()
    server.tokenizer.rendered.clear()
    response = await client.post(api.path, json=body, headers=HEADERS)
    answers = [_comparable(content_of(response))]
    if row.then is not None:
        answers.append(_comparable(content_of(await client.get(row.then))))
    asked = [_as_asked(request, body) for request in engine.requests]
    return Seen(
        response.status_code,
        [*asked, *server.grammars.asked],
        list(server.tokenizer.rendered),
        answers,
        response.headers.get("x-remora-ignored-fields"),
    )


async def fault_of(
    client: httpx.AsyncClient, server: Any, api: Api, place: str, row: Row
) -> str | None:
    """Return how a field differs from its row; None = it does not."""
    body: Mapping[str, Any] = api.body
    for other, value in row.needs.items():
        body = with_value(body, other, value)
    changed = with_value(body, place, row.value)
    if row.kind == "refused":
        there = await observe(client, server, api, changed, row)
        if there.status not in range(400, 500):
            return f"{place}: {there.status} instead of an error: {there.answer}"
        is_named = _name(row.named or place) in _name(str(there.answer))
        return None if is_named else f"{place} is not named: {there.answer}"
    without = await observe(client, server, api, body, row)
    again = await observe(client, server, api, body, row)
    there = await observe(client, server, api, changed, row)
    if without.status != 200 or without != again:
        return f"{place}: fault of the body without it: {_difference(without, again)} {without}"
    if there.status != 200:
        return f"{place}: {there.status} {there.answer}"
    if there.ignored is not None:
        return f"{place} is reported as ignored: {there.ignored}"
    if row.kind == "hint":
        there, without = (_not_repeated(seen, place) for seen in (there, without))
    if (there == without) == (row.kind == "hint"):
        return None
    return f"{place}: {'no effect' if row.kind == 'effect' else _difference(there, without)}"


def _not_repeated(seen: Seen, place: str) -> Seen:
    """Return what a request did, without what objects of the answer have at a place."""

    def bare(value: Any, steps: list[str]) -> Any:
        if isinstance(value, list):
            return [bare(one, steps) for one in value]
        if not isinstance(value, dict):
            return value
        if len(steps) == 1:
            return {k: v for k, v in value.items() if k != steps[0]}
        return {k: bare(v, steps[1:]) if k == steps[0] else v for k, v in value.items()}

    return seen._replace(answer=bare(seen.answer, place.split(".")))


def _difference(one: Seen, other: Seen) -> str:
    pairs = zip(Seen._fields, one, other, strict=True)
    return "; ".join(f"{name}: {a} not {b}" for name, a, b in pairs if a != b)


async def faults_of(
    api: Api, client: httpx.AsyncClient | None = None, server: Any = None
) -> list[str]:
    """Return how an API's fields differ from its table; of the API's own fake server by default."""
    if client is None:
        async with client_of(share_app(api.server)) as own:
            return await faults_of(api, own, api.server)
    found = [await fault_of(client, server, api, place, row) for place, row in api.rows.items()]
    return [fault for fault in found if fault is not None]


# -- documentation ------------------------------------------------------------------------------


def documented_hints() -> dict[str, set[str]]:
    """Return the documented hints of each API. Fields of list items are named without `[0]`."""
    section = DOCS.read_text("utf-8").split("\n## Hints without effect\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {
        title.strip(): set(re.findall(r"`([^`]+)`", fields))
        for titles, fields in rows
        for title in titles.replace("`", "").split(",")
    }


def _name(place: str) -> str:
    return place.replace("[0]", "")


def hints_of(rows: Rows) -> set[str]:
    """Return the names under which the documentation lists the hints of a table."""
    return {_name(name) for name, row in rows.items() if row.kind == "hint"}
