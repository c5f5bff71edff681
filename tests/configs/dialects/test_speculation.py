"""What the servers' parameters of speculative decoding mean, and why the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.sections.speculation import SpeculationSection

MODEL = {"sglang": "--model-path", "lightllm": "--model_dir", "rtp_llm": "--checkpoint-path"}


def read(system: str, **given: Any) -> SpeculationSection:
    """Return the section that command line options mean."""
    options = {f"--{name}": value for name, value in given.items()}
    return parse_args({"dialect": system, "args": {MODEL[system]: "/m", **options}}).speculation


def ngram(**given: Any) -> SpeculationSection:
    return read("sglang", **{"speculative-algorithm": "NGRAM", **given})


def test_ngram_has_sglangs_defaults() -> None:
    found = ngram()
    assert (found.method, found.shortest_suffix, found.longest_suffix) == ("ngram", 1, 12)
    assert found.max_drafts == 11  # of 12 rows of a verifying step


def test_the_longest_suffix_is_sglangs_default_number_of_rows() -> None:
    found = ngram(**{"speculative-ngram-max-match-window-size": 6})
    assert (found.longest_suffix, found.max_drafts) == (6, 5)


def test_numbers_of_rows_and_suffixes_are_converted() -> None:
    found = ngram(
        **{
            "speculative-num-draft-tokens": 4,
            "speculative-ngram-min-match-window-size": 3,
            "speculative-ngram-max-match-window-size": 8,
            "speculative-ngram-max-bfs-breadth": 1,
            "speculative-ngram-match-type": "BFS",
            "speculative-accept-threshold-single": 1.0,
        }
    )
    assert (found.max_drafts, found.shortest_suffix, found.longest_suffix) == (3, 3, 8)


def test_nothing_is_set_while_the_algorithm_is_not_given() -> None:
    assert read("sglang", **{"speculative-num-draft-tokens": 4}) == SpeculationSection()


@pytest.mark.parametrize(
    ("system", "option", "value", "says"),
    [
        ("sglang", "speculative-algorithm", "EAGLE3", "NGRAM works with any model"),
        ("sglang", "speculative-algorithm", "STANDALONE", "separate model; NGRAM works"),
        ("sglang", "speculative-draft-model-path", "/d", "NGRAM needs none"),
        ("sglang", "speculative-ngram-max-bfs-breadth", 4, "1 works, a chain"),
        ("sglang", "speculative-ngram-match-type", "PROB", "BFS works"),
        ("sglang", "speculative-accept-threshold-acc", 0.5, "1.0 works"),
        ("sglang", "speculative-token-map", "/map.pt", "NGRAM has no vocabulary"),
        ("lightllm", "mtp_mode", "deepseekv3", "speculation.method ngram works"),
        ("lightllm", "mtp_step", 1, "speculation.method ngram works"),
        ("rtp_llm", "sp-type", "vanilla", "speculation.method ngram works"),
        ("rtp_llm", "sp-type", "mtp", "speculation.method ngram works"),
        ("rtp_llm", "tree-decode-config", "/tree.json", "not speculation"),
    ],
)
def test_what_is_refused_names_what_works(system: str, option: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option} = .*refused: .*{says}"):
        read(system, **{option: value})


def test_one_row_leaves_no_draft() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        ngram(**{"speculative-num-draft-tokens": 1})
