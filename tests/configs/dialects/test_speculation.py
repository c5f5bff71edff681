"""What the servers' parameters of speculative decoding mean, and why the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import System
from remora.configs.dialects.convert import convert
from remora.configs.dialects.translate import translate
from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.sections.speculation import SpeculationSection

MODEL = {"sglang": "--model-path", "lightllm": "--model_dir", "rtp_llm": "--checkpoint-path"}


def read(system: str, **given: Any) -> SpeculationSection:
    """Return the section that command line options mean."""
    options = {f"--{name}": value for name, value in given.items()}
    return parse_args({"dialect": system, "args": {MODEL[system]: "/m", **options}}).speculation


def backend(drafting: dict[str, Any]) -> SpeculationSection:
    """Return the section that the backend's JSON means."""
    data = {"optimisations": {"speculative_decoding": drafting}}
    return parse_args({"dialect": "backend", "args": data, "model": {"path": "m"}}).speculation


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


def test_texts_serve_later_requests_where_a_capacity_is_given() -> None:
    assert ngram().shared_index_memory is None
    found = ngram(**{"speculative-ngram-capacity": 1000})
    assert found.shared_index_memory == 16_000


def test_nothing_is_set_while_the_algorithm_is_not_given() -> None:
    assert read("sglang", **{"speculative-num-draft-tokens": 4}) == SpeculationSection()


@pytest.mark.parametrize(
    ("system", "option", "value", "says"),
    [
        ("sglang", "speculative-algorithm", "EAGLE3", "needs --speculative-draft-model-path"),
        ("sglang", "speculative-algorithm", "STANDALONE", "needs --speculative-draft-model-path"),
        ("sglang", "speculative-draft-model-revision", "v2", "part of the draft"),
        ("sglang", "speculative-eagle-topk", 4, "1 works, a chain"),
        ("sglang", "speculative-ngram-max-bfs-breadth", 4, "1 works, a chain"),
        ("sglang", "speculative-ngram-match-type", "PROB", "BFS works"),
        ("sglang", "speculative-accept-threshold-acc", 0.5, "1.0 works"),
        ("rtp_llm", "tree-decode-config", "/tree.json", "not speculation"),
    ],
)
def test_what_is_refused_names_what_works(system: str, option: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option} = .*refused: .*{says}"):
        read(system, **{option: value})


@pytest.mark.parametrize(
    ("system", "given", "means"),
    [
        ("sglang", {"algorithm": "STANDALONE", "draft-model-path": "/d"}, ("draft", "/d", 3)),
        (
            "sglang",
            {
                "algorithm": "STANDALONE",
                "draft-model-path": "/d",
                "num-steps": 4,
                "eagle-topk": 1,
                "num-draft-tokens": 5,
            },
            ("draft", "/d", 4),
        ),
        ("sglang", {"algorithm": "EAGLE3", "draft-model-path": "/h"}, ("eagle", "/h", 5)),
        ("sglang", {"algorithm": "NEXTN"}, ("mtp", None, 3)),
        ("sglang", {"algorithm": "EAGLE", "num-steps": 2}, ("mtp", None, 2)),
        ("lightllm", {"mtp_mode": "deepseekv3"}, ("mtp", None, 1)),
        ("lightllm", {"mtp_step": 2}, ("none", None, 10)),
        ("lightllm", {"mtp_mode": "deepseekv3", "mtp_step": 2}, ("mtp", None, 2)),
        ("rtp_llm", {"sp-type": "mtp"}, ("mtp", None, 1)),
        ("rtp_llm", {"sp-type": "mtp", "gen-num-per-cycle": 3}, ("mtp", None, 3)),
        ("rtp_llm", {"sp-type": "vanilla", "gen-num-per-cycle": 3}, ("none", None, 10)),
    ],
)
def test_draft_models_and_heads(system: str, given: dict[str, Any], means: tuple[Any, ...]) -> None:
    prefix = "speculative-" if system == "sglang" else ""
    found = read(system, **{f"{prefix}{name}": value for name, value in given.items()})
    assert (found.method, found.draft_model, found.max_drafts) == means


@pytest.mark.parametrize("option", ["speculative-num-draft-tokens", "speculative-eagle-topk"])
def test_rows_and_branches_need_steps(option: str) -> None:
    given = {"speculative-algorithm": "STANDALONE", "speculative-draft-model-path": "/d", option: 1}
    with pytest.raises(ConfigError, match="need --speculative-num-steps"):
        read("sglang", **given)


@pytest.mark.parametrize(
    ("extra", "means"),
    [
        ({"draft_model_path": "/d"}, ("draft", "/d", 5)),
        ({"algorithm": "eagle3", "draft_model_path": "/h", "num_steps": 3}, ("eagle", "/h", 3)),
        ({"algorithm": "nextn", "num_draft_tokens": 3, "topk": 1}, ("mtp", None, 2)),
        (
            {"algorithm": "n-gram", "num_draft_tokens": 6, "num_steps": 3, "topk": 1, "tp_size": 2},
            ("ngram", None, 5),
        ),
    ],
)
def test_the_backends_algorithms(extra: dict[str, Any], means: tuple[Any, ...]) -> None:
    drafting = {"enabled": True, "extra_params": extra}
    found = backend(drafting)
    assert (found.method, found.draft_model, found.max_drafts) == means


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "would draft for itself"),
        ({"algorithm": "eagle"}, "needs a head"),
        ({"algorithm": "nextn", "draft_model_path": "/d"}, "own checkpoint: leave it out"),
        ({"draft_model_path": "/d", "topk": 8}, "1 works, a chain"),
    ],
)
def test_what_the_backend_cannot_have(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        backend({"enabled": True, "extra_params": extra})


@pytest.mark.parametrize("system", ["sglang", "backend"])
@pytest.mark.parametrize(
    "keys",
    [
        {"method": "ngram", "max_drafts": 4},
        {"method": "draft", "draft_model": "/d", "max_drafts": 4},
        {"method": "eagle", "draft_model": "/h", "max_drafts": 4},
        {"method": "mtp", "max_drafts": 4},
    ],
    ids=lambda keys: keys["method"],
)
def test_methods_are_converted_without_loss(system: System, keys: dict[str, Any]) -> None:
    found = convert(DIALECTS[system], {f"speculation.{key}": value for key, value in keys.items()})
    assert found.lost == {}
    assert translate(DIALECTS[system], found.values).args["speculation"].items() >= keys.items()
    widths = [value for name, value in found.values.items() if name.endswith("topk")]
    assert widths == ([] if keys["method"] == "ngram" else [1])  # else they mean a tree there


def test_one_row_leaves_no_draft() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        ngram(**{"speculative-num-draft-tokens": 1})
