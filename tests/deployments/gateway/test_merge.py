"""Merging of several responses, or of none."""

from __future__ import annotations

from remora.deployments.gateway.merge import merge_lists


def test_lists_of_models_that_were_never_up_are_empty() -> None:
    assert merge_lists("models", []) == {"models": []}


def test_lists_of_all_are_one() -> None:
    merged = merge_lists("data", [b'{"object":"list","data":[1]}', b'{"data":[2,3]}'])

    assert merged == {"object": "list", "data": [1, 2, 3]}
