"""What a caller gets of the engine's events: text, ids, reasons, log-probabilities."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine.spec.counts import DraftCounts
from remora.engine.tokens.outputs import OutputProcessor
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import (
    FinishReason,
    LogprobRows,
    Output,
    Request,
    SamplingParams,
    SequenceOutput,
)
from tests.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())
EOS = TOKENIZER.eos_token_ids[0]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_processor(*, prompt: str = "Say:", **params: Any) -> OutputProcessor:
    request = Request(request_id="r", prompt_ids=ids_of(prompt), sampling=SamplingParams(**params))
    return OutputProcessor(request, TOKENIZER)


def make_event(ids: list[int], *, index: int = 0, **fields: Any) -> SequenceOutput:
    return SequenceOutput(request_id="r", index=index, token_ids=tuple(ids), **fields)


def make_lines(ids: list[int]) -> LogprobRows:
    array = np.array(ids, np.int64)
    return LogprobRows(
        token_ids=array,
        logprobs=-array.astype(np.float32),
        ranks=np.ones(len(ids), np.int32),
        top_ids=array[:, None],
        top_logprobs=-array.astype(np.float32)[:, None],
    )


def make_events(
    ids: list[int], cuts: list[int], finish_reason: FinishReason, stop_token_id: int | None
) -> list[SequenceOutput]:
    """Cut ids into events; the last one ends the sequence."""
    places = sorted({0, *(cut % (len(ids) + 1) for cut in cuts), len(ids)})
    parts = [ids[start:end] for start, end in pairwise(places)] or [[]]
    events = [make_event(part, logprobs=make_lines(part)) for part in parts[:-1]]
    last = make_event(
        parts[-1],
        logprobs=make_lines(parts[-1]),
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
    )
    return [*events, last]


def total(outputs: list[Output]) -> dict[str, Any]:
    return {
        "text": "".join(output.text for output in outputs),
        "token_ids": [token_id for output in outputs for token_id in output.token_ids],
        "logprobs": [line for output in outputs for line in output.logprobs or ()],
        "reasons": [
            (output.finish_reason, output.stop_reason)
            for output in outputs
            if output.finish_reason is not None
        ],
        "num_output_tokens": outputs[-1].num_output_tokens,
    }


@settings(deadline=None, max_examples=200)
@given(
    ids=st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    stop=st.sampled_from([(), ("e",), ("the", "he"), ("\ufffd",), ("qu", "a", "on")]),
    ends_by_eos=st.booleans(),
    params=st.fixed_dictionaries(
        {
            "include_stop_in_output": st.booleans(),
            "min_tokens": st.sampled_from([0, 0, 5]),
            "skip_special_tokens": st.booleans(),
        }
    ),
)
def test_the_total_does_not_depend_on_how_tokens_were_grouped(
    ids: list[int],
    cuts: list[int],
    groups: list[int],
    stop: tuple[str, ...],
    ends_by_eos: bool,
    params: dict[str, Any],
) -> None:
    ids = [*ids, EOS] if ends_by_eos else ids
    end = (FinishReason.STOP, EOS) if ends_by_eos else (FinishReason.LENGTH, None)
    events = make_events(ids, cuts, *end)
    whole = make_processor(stop=stop, logprobs=1, max_tokens=99, **params)
    pieces = make_processor(stop=stop, logprobs=1, max_tokens=99, **params)

    expected = whole.process(make_events(ids, [], *end))
    outputs = []
    while events:
        size = groups[len(events) % len(groups)]
        outputs += pieces.process(events[:size])
        events = events[size:]

    assert total(outputs) == total(expected)
    assert outputs[-1].finish_reason is not None
    assert pieces.is_finished
    assert len(total(expected)["logprobs"]) == len(total(expected)["token_ids"])


def test_text_comes_as_its_tokens_do() -> None:
    processor = make_processor()

    outputs = [
        *processor.process([make_event(ids_of(" the"), num_cached_tokens=4)]),
        *processor.process([make_event(ids_of(" lazy dog"), finish_reason=FinishReason.LENGTH)]),
    ]

    assert [output.text for output in outputs] == [" the", " lazy dog"]
    assert [output.finish_reason for output in outputs] == [None, FinishReason.LENGTH]
    assert [output.num_cached_tokens for output in outputs] == [4, 4]
    assert outputs[1].stop_reason is None
    assert outputs[0].logprobs is None
    assert processor.take_stopped() == []


def test_events_of_one_index_become_one_output_in_order_of_arrival() -> None:
    processor = make_processor(n=3)

    outputs = processor.process(
        [
            make_event(ids_of(" the"), index=2),
            make_event(ids_of(" fox"), index=0),
            make_event(ids_of(" dog"), index=2, finish_reason=FinishReason.LENGTH),
        ]
    )

    assert [(output.index, output.text) for output in outputs] == [(2, " the dog"), (0, " fox")]
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH, None]
    assert not processor.is_finished


def test_a_stop_string_cuts_text_and_ids_and_asks_for_an_abort() -> None:
    processor = make_processor(stop=("lazy",), logprobs=0)
    ids = ids_of("the lazy dog jumps")
    num_until_stop = len(ids_of("the lazy"))
    (output,) = processor.process([make_event(ids, logprobs=make_lines(ids))])

    assert output.text == "the "
    assert list(output.token_ids) == ids[:num_until_stop]
    assert output.logprobs is not None
    assert [line.token_id for line in output.logprobs] == ids[:num_until_stop]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "lazy")
    assert processor.is_finished
    assert processor.take_stopped() == [0]
    assert processor.take_stopped() == []
    assert processor.process([make_event(ids, finish_reason=FinishReason.ABORT)]) == []


LENGTH: dict[str, Any] = {"finish_reason": FinishReason.LENGTH}
STOP = FinishReason.STOP
OWN_END: dict[str, Any] = {"finish_reason": STOP, "stop_token_id": EOS}
(PERIOD,) = ids_of(".")
AT_PERIOD: dict[str, Any] = {"finish_reason": STOP, "stop_token_id": PERIOD}
DOG = ids_of("dog")


@pytest.mark.parametrize(
    ("params", "ids", "event", "text", "end", "stopped"),
    [
        # A stop string may be shown; one that comes with the engine's own end needs no abort.
        ({"stop": ("lazy",), "include_stop_in_output": True}, ids_of("the lazy dog"), {},
         "the lazy", (STOP, "lazy"), [0]),
        ({"stop": ("dog",)}, ids_of("lazy dog"), LENGTH, "lazy ", (STOP, "dog"), []),
        # Stop strings count only after min_tokens.
        ({"stop": ("dog",), "min_tokens": len(DOG)}, ids_of("dog dog dog"), {},
         "dog ", (STOP, "dog"), [0]),
        ({"stop_regex": ("[0-9]{2}",)}, ids_of("chapter 1, chapter 23 and on"), {},
         "chapter 1, chapter ", (STOP, "23"), [0]),
        # What an expression held back is shown at the end.
        ({"stop_regex": ("[0-9]{9}",), "include_stop_in_output": True}, ids_of("only 123"), LENGTH,
         "only 123", (FinishReason.LENGTH, None), []),
        # The model's own end has no reason and no text.
        ({"skip_special_tokens": True}, [*DOG, EOS], OWN_END, "dog", (STOP, None), []),
        ({"skip_special_tokens": False}, [*DOG, EOS], OWN_END, "dog", (STOP, None), []),
        # A stop ID of the caller is the reason, or text where it does not end the sequence.
        ({"stop_token_ids": (PERIOD,)}, [*DOG, PERIOD], AT_PERIOD, "dog", (STOP, PERIOD), []),
        ({"stop_token_ids": (PERIOD,), "include_stop_in_output": True}, [*DOG, PERIOD], AT_PERIOD,
         "dog.", (STOP, PERIOD), []),
        ({"stop_token_ids": (PERIOD,), "min_tokens": 5}, [PERIOD, *DOG], {},
         ".dog", (None, None), []),
        # A complete grammar shows its last token.
        ({}, ids_of("{}"), {"finish_reason": STOP}, "{}", (STOP, None), []),
    ],
)  # fmt: skip
def test_an_output_ends_where_its_request_says(
    params: dict[str, Any],
    ids: list[int],
    event: dict[str, Any],
    text: str,
    end: tuple[FinishReason | None, str | int | None],
    stopped: list[int],
) -> None:
    processor = make_processor(**params)

    outputs = processor.process([make_event(ids, **event)])

    assert "".join(output.text for output in outputs) == text
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == end
    assert isinstance(end[1], str) or list(outputs[-1].token_ids) == ids
    assert processor.take_stopped() == stopped


def test_text_that_only_looked_like_a_stop_string_comes_at_the_end() -> None:
    processor = make_processor(stop=("dogs",))

    (first,) = processor.process([make_event(ids_of("lazy dog"))])
    (last,) = processor.process([make_event([], finish_reason=FinishReason.ABORT)])

    assert first.text + last.text == "lazy dog"
    assert first.text == "lazy "
    assert last.finish_reason == FinishReason.ABORT


def test_prompt_logprobs_come_once_with_the_first_token_of_index_0() -> None:
    processor = make_processor(n=2, prompt_logprobs=1)
    parts = (make_lines([5]), make_lines([6, 7]))

    outputs = processor.process(
        [
            make_event([8], index=1, prompt_logprobs=parts),
            make_event([8], index=0, prompt_logprobs=parts),
        ]
    )
    later = processor.process([make_event([9], index=0)])

    assert outputs[0].prompt_logprobs is None
    assert outputs[1].prompt_logprobs is not None
    assert outputs[1].prompt_logprobs[0] is None
    assert [line.token_id for line in outputs[1].prompt_logprobs if line] == [5, 6, 7]
    assert later[0].prompt_logprobs is None


def test_a_prompt_of_one_token_has_one_empty_line() -> None:
    processor = make_processor(prompt_logprobs=1)

    (output,) = processor.process([make_event([8])])

    assert output.prompt_logprobs == (None,)


def test_without_tokenizer_there_are_ids_and_no_text() -> None:
    request = Request(request_id="r", prompt_ids=[1], sampling=SamplingParams(stop=("a",)))
    processor = OutputProcessor(request, None)

    (output,) = processor.process([make_event([8, 9], finish_reason=FinishReason.LENGTH)])

    assert (output.text, output.token_ids) == ("", (8, 9))
    assert processor.is_finished


def test_a_healed_prompt_is_not_repeated() -> None:
    request = Request(
        request_id="r", prompt_ids=ids_of("Say: wor"), sampling=SamplingParams(), heal=True
    )
    processor = OutputProcessor(request, TOKENIZER)
    ids = [*ids_of("Say: wor")[-1:], *ids_of("ld")]

    outputs = processor.process([make_event(ids, finish_reason=FinishReason.LENGTH)])

    assert "".join(output.text for output in outputs) == "ld"
    assert outputs[-1].num_output_tokens == len(ids)


def test_predicted_tokens_are_counted_up_to_a_stop_string() -> None:
    processor = make_processor(stop=("c",), max_tokens=9)
    found = processor.process([make_event(ids_of("ab"), predicted=(1, 0))])
    found += processor.process([make_event(ids_of("cd"), predicted=(3, 2))])
    assert processor.is_finished
    assert found[-1].predicted == (3, 2)


def test_right_drafts_after_a_stop_string_are_not_counted() -> None:
    processor = make_processor(stop=("c",), max_tokens=9)
    run = [token_id for letter in "bcde" for token_id in ids_of(letter)]
    processor.process([make_event(ids_of("a"))])
    found = processor.process([make_event(run, drafts=DraftCounts(1, 4, 3))])
    assert processor.is_finished
    assert found[-1].drafts == (1, 4, 2)  # b and c
    assert found[-1].num_output_tokens == 3
