"""An output that begins with what another engine has given: taken as its own, and continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from remora.configs.errors import Unavailable
from remora.engine.client import LocalEngineClient
from remora.engine.types import (
    FinishReason,
    Output,
    Request,
    Resumption,
    SamplingParams,
    SequenceOutput,
)
from tests.engine.fakes import MakeClient
from tests.engine.test_client import collect

NUM_TOKENS = 12


@pytest.fixture
async def client(make_client: MakeClient) -> LocalEngineClient:
    return make_client(max_model_len=64)


class Notes(list[tuple[SequenceOutput, ...]]):
    """The events of each output, as they are told."""

    def take(self, events: Sequence[SequenceOutput]) -> None:
        self.append(tuple(events))


def make_request(given: Sequence[tuple[SequenceOutput, ...]], notes: Notes) -> Request:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    request = Request(request_id="r", prompt_ids=[1, 2, 3], sampling=sampling)
    return replace(request, resumption=Resumption(tuple(given), notes.take))


def ids_of(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_any_beginning_is_continued_to_the_same_end(client: LocalEngineClient) -> None:
    notes = Notes()
    whole = await collect(client, make_request((), notes))

    for num_given in range(len(notes) + 1):
        told = Notes()
        outputs = await collect(client, make_request(notes[:num_given], told))

        assert ids_of(outputs) == ids_of(whole)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert outputs[-1].num_output_tokens == NUM_TOKENS
        assert [output.token_ids for output in outputs[:num_given]] == [
            output.token_ids for output in whole[:num_given]
        ]
        num_tokens = sum(len(event.token_ids) for events in told for event in events)
        assert num_tokens == NUM_TOKENS - len(ids_of(whole[:num_given]))


async def test_what_has_ended_already_costs_no_step(client: LocalEngineClient) -> None:
    notes = Notes()
    await collect(client, make_request((), notes))
    steps = client.stats().steps_total

    await collect(client, make_request(notes, Notes()))

    assert client.stats().steps_total == steps


async def test_a_beginning_that_is_read_while_the_server_starts_to_drain_is_not_continued(
    client: LocalEngineClient,
) -> None:
    notes = Notes()
    await collect(client, make_request((), notes))
    outputs = client.generate(make_request(notes[:1], Notes()))
    await anext(outputs)

    await client.drain(0.0)

    with pytest.raises(Unavailable):
        await anext(outputs)
