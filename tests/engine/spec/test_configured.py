"""Keys of the section `speculation` reach proposer and controller."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.speculation_plan import SpeculationPlan, plan_speculation
from remora.configs.schema import ServeConfig
from remora.engine.spec.build import make_controller, make_proposer
from remora.engine.types import Namespace


def configured(keys: dict[str, Any], **sections: Any) -> ServeConfig:
    return parse_args({"model": {"path": "/m"}, "speculation": keys, **sections})


def planned(**keys: Any) -> SpeculationPlan:
    """Return what the section means with these keys."""
    plan = plan_speculation(configured({"method": "ngram", **keys}), "cpu")
    assert plan is not None
    return plan


def drafts(token_ids: list[int], most: int = 2, **keys: Any) -> list[int]:
    """Return what the configured proposer drafts after a text."""
    proposer = make_proposer(planned(**keys))
    proposer.begin(0, token_ids, Namespace())
    proposer.propose([])
    return list(proposer.propose([(0, most)])[0])


@pytest.mark.observes("speculation.method")
def test_there_are_no_drafts_without_a_method() -> None:
    assert plan_speculation(configured({}), "cpu") is None
    assert drafts([1, 2, 3, 1, 2]) == [3, 1]


@pytest.mark.observes("speculation.shortest_suffix")
def test_shorter_suffixes_are_not_looked_up() -> None:
    text = [1, 2, 3, 9, 2]
    assert drafts(text, shortest_suffix=1) == [3, 9]
    assert drafts(text, shortest_suffix=2) == []


@pytest.mark.observes("speculation.longest_suffix")
def test_longer_suffixes_are_not_preferred() -> None:
    text = [1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3]
    assert drafts(text, longest_suffix=3) == [4, 5]
    assert drafts(text, longest_suffix=2) == [6, 1]


@pytest.mark.observes("speculation.index_memory")
def test_a_small_index_forgets_the_beginning_of_a_text() -> None:
    text = [*range(300), 0, 1]
    assert drafts(text) == [2, 3]
    assert drafts(text, index_memory=64 * 1024) == []


@pytest.mark.observes("speculation.shared_index_memory")
def test_texts_of_earlier_requests_are_searched_where_there_is_memory_for_them() -> None:
    found = {}
    for memory in (None, "1MiB"):
        proposer = make_proposer(planned(shared_index_memory=memory))
        proposer.begin(0, [1, 2, 3, 4], Namespace())
        proposer.end(0)
        proposer.begin(1, [7, 1, 2], Namespace())
        found[memory] = list(proposer.propose([(1, 2)])[0])
    assert found == {None: [], "1MiB": [3, 4]}


@pytest.mark.observes("speculation.max_drafts", "speculation.adaptive")
def test_draft_lengths_adapt_or_stay_at_the_limit() -> None:
    found = {}
    for is_adaptive in (False, True):
        controller = make_controller(planned(max_drafts=3, adaptive=is_adaptive))
        for _ in range(200):
            controller.observe(0, controller.limit(0, 1), 0)
        found[is_adaptive] = [controller.limit(0, 1) for _ in range(10)]
    assert found[False] == [3] * 10
    assert sum(found[True]) <= 1


@pytest.mark.parametrize(
    ("method", "device", "sections", "says"),
    [
        ("mtp", "cuda", {"parallel": {"pp_size": 2}}, "pp_size = 2 stages"),
        ("eagle", "cpu", {"parallel": {"pp_size": 3}}, "pp_size = 3 stages"),
        ("ngram", "cuda", {"engine": {"deterministic": True}}, "deterministic"),
    ],
)
def test_where_rows_cannot_have_drafts_the_section_is_refused(
    method: str, device: str, sections: dict[str, Any], says: str
) -> None:
    keys = {"draft_model": "some/head"} if method == "eagle" else {}
    config = configured({"method": method, **keys}, **sections)

    with pytest.raises(ConfigError, match=rf"(?s){says}.* leave"):
        plan_speculation(config, device)
    for works in ("ngram", "mtp"):
        assert plan_speculation(configured({"method": works}, parallel={"tp_size": 2}), "cuda")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"method": "ngram", "shortest_suffix": 6}, "must not exceed longest_suffix, 5"),
        ({"shortest_suffix": 3}, "needs method ngram"),
        ({"index_memory": "1MiB"}, "needs method ngram"),
        ({"shared_index_memory": "1MiB"}, "needs method ngram"),
        ({"method": "ngram", "max_drafts": 0}, "max_drafts"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configured(keys)
