"""What the keys of pages for layers with a window do to an engine."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from tests.engine.configured import PAGE_BYTES, configured, plan_for
from tests.engine.scheduler.scheduled import Harness

MIXED = (None, 8, 8)  # windows of three layers
ALL = (8, 8, 8)
SHORT: dict[str, Any] = {"kv_tokens": 256}


def held_at_the_end(harness: Harness, num_tokens: int) -> tuple[int, int]:
    """Run a prompt; return the pages held before its last token, of either kind."""
    harness.add("r", [1] * num_tokens, 2)
    held = (0, 0)
    while harness.engine.has_work:
        harness.step()
        stats = harness.engine.stats()
        held = (stats.num_held_pages, stats.num_held_window_pages) if stats.num_running else held
    return held


@pytest.mark.observes("engine.window_pages")
def test_a_long_sequence_holds_its_window_only_or_everything() -> None:
    apart, together = (
        configured(windows=MIXED, window_pages=how, kv_tokens=256) for how in ("auto", "off")
    )

    assert held_at_the_end(apart, 100) == (25, 2)
    assert held_at_the_end(together, 100) == (25, 0)
    assert together.engine.stats().num_window_pages == 0


@pytest.mark.observes("engine.window_ratio")
@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_layers_with_a_window_have_that_share_of_the_tokens(ratio: float) -> None:
    stats = configured(windows=MIXED, window_ratio=ratio, kv_tokens=400).engine.stats()

    assert stats.num_pages == 100
    assert stats.num_window_pages == int(101 * ratio) - 1


@pytest.mark.observes("engine.window_saving")
@pytest.mark.parametrize(("saving", "pages"), [(0.0, 100), (0.5, 57), (1.0, 14)])
def test_between_as_many_tokens_and_what_long_sequences_need(saving: float, pages: int) -> None:
    # 128 tokens are 32 pages, of which a sequence needs (8 + 8) / 4 + 1 for layers with a window.
    stats = configured(windows=MIXED, window_saving=saving, kv_tokens=400).engine.stats()

    assert (stats.num_pages, stats.num_window_pages) == (100, pages)


def test_without_a_word_it_is_done_where_contexts_are_long() -> None:
    assert plan_for(windows=MIXED, **SHORT).windows is not None
    assert plan_for(windows=(None, 64, 64), **SHORT).windows is None  # 128 are two windows
    assert plan_for(windows=(64, 64, 64), **SHORT).windows is not None  # costs nobody anything
    assert plan_for(windows=(128, 128), **SHORT).windows is None
    assert plan_for(**SHORT).windows is None


def test_memory_for_a_single_short_sequence_is_not_divided() -> None:
    assert plan_for(windows=(None, 40), kv_tokens=40).windows is None

    with pytest.raises(ConfigError, match=r"leaves 16 tokens .* one sequence needs 40"):
        plan_for(windows=(None, 40), kv_tokens=40, window_ratio=0.5)


@pytest.mark.parametrize("windows", [MIXED, ALL, (8, None, 12, None)])
@pytest.mark.parametrize("keys", [{}, {"window_ratio": 0.6}, {"window_ratio": 1.0}])
def test_both_kinds_together_take_no_more_than_was_given(
    windows: tuple[int | None, ...], keys: dict[str, Any]
) -> None:
    given = 600 * PAGE_BYTES
    plan = plan_for(without=("kv_tokens",), windows=windows, kv_memory=given, **keys)

    assert plan.windows is not None
    num_windowed = sum(plan.windows.layers)
    taken = PAGE_BYTES * (
        (len(windows) - num_windowed) * (plan.num_pages + 1)
        + num_windowed * (plan.windows.num_pages + 1)
    )
    assert plan.kv_bytes == taken
    assert given - 4 * len(windows) * PAGE_BYTES <= taken <= given


def test_where_all_layers_have_a_window_long_sequences_are_no_dearer() -> None:
    options: dict[str, Any] = {"without": ("kv_tokens",), "kv_memory": 300 * PAGE_BYTES}
    apart = plan_for(windows=ALL, **options)
    together = plan_for(windows=ALL, window_pages="off", **options)

    assert apart.windows is not None
    assert apart.windows.num_pages == together.num_pages == 99
    assert apart.kv_tokens >= 5 * together.kv_tokens


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"window_ratio": 0.5, "windows": ()}, "window_ratio"),
        ({"window_saving": 0.5, "windows": (None, 128)}, "window_saving"),
        ({"window_ratio": 0.5, "window_pages": "off"}, "window_ratio"),
        ({"window_saving": 0.5, "window_pages": "off"}, "window_saving"),
        ({"window_ratio": 0.5, "window_saving": 0.5}, "window_saving"),
        ({"window_ratio": 0}, "window_ratio"),
    ],
)
def test_contradictions_and_keys_without_effect_are_refused(keys: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.{key}"):
        plan_for(**({"windows": MIXED} | keys))
