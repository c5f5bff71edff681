"""Stop texts: any cut of a text gives what the whole text gives."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine.tokens.stops import StopTexts

TEXTS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4).map(tuple)
CUTS = st.lists(st.integers(0, 100), max_size=8)


def make_pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def make_expected(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Read the text letter by letter; at the first end of a stop string the longest one counts."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(
    pieces: list[str], stops: tuple[str, ...], include: bool, patterns: tuple[str, ...] = ()
) -> tuple[str, str | None]:
    finder, shown = StopTexts(stops, patterns, include=include), ""
    for piece in pieces:
        text, stop = finder.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + finder.finish(), None


@settings(deadline=None)
@given(
    text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8), include=st.booleans()
)
def test_any_cut_gives_the_first_match_of_the_whole_text(
    text: str, stops: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    assert run(make_pieces(text, cuts), stops, include) == make_expected(text, stops, include)


@given(
    text=TEXTS,
    stops=STOPS,
    patterns=st.lists(st.sampled_from(["a[bc]{1,2}", "b{3}", "ca?b"]), max_size=2).map(tuple),
    cuts=CUTS,
    include=st.booleans(),
)
def test_expressions_give_the_same_for_any_cut_and_go_together_with_texts(
    text: str, stops: tuple[str, ...], patterns: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    matches = [
        (end, start)
        for end in range(len(text) + 1)
        for start in range(end)
        if text[start:end] in stops or any(re.fullmatch(p, text[start:end]) for p in patterns)
    ]
    end, start = min(matches, default=(len(text), None))

    shown = run(make_pieces(text, cuts), stops, include, patterns)

    expected = text if start is None else text[: end if include else start]
    assert shown == (expected, None if start is None else text[start:end])


def test_text_that_an_expression_may_still_reach_is_held_back() -> None:
    finder = StopTexts((), ("[.!?]{2}",), include=False)

    assert finder.push("Well.") == ("Well", None)
    assert finder.push("..") == ("", "..")


@settings(deadline=None)
@given(text=TEXTS, stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    finder, shown, stop = StopTexts(stops, include=False), "", None

    for place, char in enumerate(text):
        piece, stop = finder.push(char)
        shown += piece
        if stop is not None:
            break
        held = text[len(shown) : place + 1]
        ends = [text[start : place + 1] for start in range(place + 1)]
        openings = [end for end in ends if any(one.startswith(end) for one in stops)]
        assert held == max(openings, key=len, default="")
