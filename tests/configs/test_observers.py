"""configs/observed.json is what the tests themselves say."""

from __future__ import annotations

from tests.configs.observers import OBSERVED, page


def test_the_table_of_observing_tests_is_what_the_marks_say() -> None:
    assert OBSERVED.read_text() == page(), "run: python -m tests.configs.observers"
