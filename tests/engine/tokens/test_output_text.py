"""Texts that begin alike and then differ: none of them shows in another."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine.tokens.output_text import OutputText
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import Request, SamplingParams
from tests.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def run(text: OutputText, ids: list[int]) -> tuple[str, str | None]:
    """Return the shown text, and the stop text."""
    shown = ""
    for token_id in ids:
        shown += text.push(token_id)
        if text.stop is not None:
            return shown, text.stop
    return shown + text.finish(), text.stop


@settings(max_examples=200)
@given(
    start=IDS,
    ends=st.lists(IDS, min_size=2, max_size=3),
    stop=st.lists(st.sampled_from(["e", "th", " a", "on ", "\ufffd"]), max_size=2),
    min_tokens=st.integers(0, 4),
)
def test_forks_grow_alone(
    start: list[int], ends: list[list[int]], stop: list[str], min_tokens: int
) -> None:
    sampling = SamplingParams(stop=tuple(stop), min_tokens=min_tokens, max_tokens=100)
    request = Request(request_id="r", prompt_ids=[7, 8, 9], sampling=sampling)
    trunk, before = OutputText(request, TOKENIZER), ""
    for token_id in start:
        before += trunk.push(token_id)
        if trunk.stop is not None:
            return
    forks = [trunk.fork() for _ in ends]

    for fork, end in zip(forks, ends, strict=True):
        shown, found = run(fork, end)
        assert (before + shown, found) == run(OutputText(request, TOKENIZER), start + end)
        assert fork.num_tokens >= trunk.num_tokens == len(start)
