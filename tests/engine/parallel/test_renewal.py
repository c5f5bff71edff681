"""An engine that has lost its other ranks goes on with new ones, as if it had just begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import EngineError
from remora.configs.load import parse_args
from remora.engine.engine import Engine
from remora.engine.kv.radix import RadixNode
from remora.engine.launch import BuiltEngine, build_engine
from remora.engine.protocols import NO_ADAPTERS, Adapting
from remora.engine.types import Request, SamplingParams
from remora.lora.setup import pooling
from tests.conftest import TinyCheckpoints
from tests.engine.parallel.teams import ThreadTeam
from tests.lora.adapters import make_adapter

PROMPT = [30 + at % 200 for at in range(50)]
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@contextmanager
def team_of_two(
    path: Path, *, adapting: Adapting = NO_ADAPTERS, **sections: Any
) -> Iterator[tuple[BuiltEngine, ThreadTeam]]:
    """Build an engine whose rank 1 is a thread."""
    config = parse_args(
        {
            "model": {"path": str(path), "dtype": "float32"},
            "engine": {"kv_tokens": 512, "num_threads": 1, "cpu_kernels": "torch"},
            "parallel": {"tp_size": 2},
            **sections,
        }
    )
    team = ThreadTeam(adapting=adapting)
    built = build_engine(config, adapting=adapting, team=team, show_progress=False)
    try:
        yield built, team
    finally:
        built.engine.close()
        team.join()


def answer(
    engine: Engine, name: str, sampling: SamplingParams = LONG, *, lora_id: int = 0
) -> list[int]:
    request = Request(request_id=name, prompt_ids=PROMPT, sampling=sampling, lora_id=lora_id)
    engine.add(request)
    return [t for output in until_idle(engine) for t in output]


def until_idle(engine: Engine) -> Iterator[tuple[int, ...]]:
    while engine.has_work:
        yield from (output.token_ids for output in engine.step())


def lose(engine: Engine, team: ThreadTeam, *, num_steps: int) -> None:
    """Let rank 1 leave after some steps of three requests."""
    for number in range(3):
        sampling = SamplingParams(max_tokens=60, temperature=0.9, seed=number, ignore_eos=True)
        engine.add(Request(request_id=f"lost {number}", prompt_ids=PROMPT, sampling=sampling))
    for _ in range(num_steps):
        engine.step()
    team.members[1].close()
    with pytest.raises(EngineError):
        for _ in until_idle(engine):
            pass


class Cache:
    """What a listener of the prefix cache knows."""

    def __init__(self) -> None:
        self.num_stored = 0

    def stored(self, node: RadixNode, first: int) -> None:
        self.num_stored += len(node.pages) - first

    def removed(self, node: RadixNode, first: int) -> None:
        self.num_stored -= len(node.pages) - first

    def cleared(self) -> None:
        self.num_stored = 0


SPECULATION = {"speculation": {"method": "ngram"}}


@pytest.mark.parametrize(
    ("num_steps", "sections"),
    [
        (0, {}),
        (1, {}),
        (5, {}),
        (1, SPECULATION),
        pytest.param(0, SPECULATION, marks=pytest.mark.slow),
        pytest.param(5, SPECULATION, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, int) else ("speculation" if value else "plain"),
)
def test_new_ranks_give_the_same_answers_from_an_empty_cache(
    num_steps: int, sections: dict[str, Any], tiny_checkpoints: TinyCheckpoints
) -> None:
    with team_of_two(tiny_checkpoints("llama"), **sections) as (built, team):
        engine, cache = built.engine, Cache()
        engine.watch_cache(cache)
        right = answer(engine, "before")
        lose(engine, team, num_steps=num_steps)
        before = engine.stats()
        assert before.num_free_pages < before.num_pages
        assert cache.num_stored > 0

        assert built.renewal is not None
        built.renewal.run()

        now = engine.stats()
        assert (now.num_free_pages, now.num_running, now.num_waiting) == (now.num_pages, 0, 0)
        assert now.steps_total == before.steps_total
        assert cache.num_stored == 0
        assert not engine.has_work
        engine.check_integrity()
        assert answer(engine, "after") == right
        assert engine.stats().cached_tokens_total == now.cached_tokens_total
        engine.check_integrity()


def test_ranks_may_be_lost_again_and_their_ids_may_return(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    with team_of_two(tiny_checkpoints("llama")) as (built, team):
        right = answer(built.engine, "same")
        assert built.renewal is not None
        for _ in range(2):
            lose(built.engine, team, num_steps=2)
            built.renewal.run()
            assert answer(built.engine, "same") == right


def test_new_ranks_get_the_adapters_that_requests_need(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama")
    for seed in (1, 2):
        make_adapter(path, tmp_path / str(seed), seed=seed, r=4, target_modules="all-linear")
    adapting = pooling({str(seed): tmp_path / str(seed) for seed in (1, 2)}, num_slots=2)
    with team_of_two(path, adapting=adapting) as (built, team):
        right = [answer(built.engine, "before", lora_id=lora_id) for lora_id in range(3)]
        assert len({tuple(ids) for ids in right}) == 3
        lose(built.engine, team, num_steps=2)
        assert built.renewal is not None
        built.renewal.run()
        for lora_id in (2, 0, 1):
            assert answer(built.engine, "after", lora_id=lora_id) == right[lora_id]
        built.engine.check_integrity()


def test_edits_of_lost_rows_are_dropped(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    processed = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, repetition_penalty=1.3, logprobs=2
    )
    with team_of_two(tiny_checkpoints("llama")) as (built, team):
        right = answer(built.engine, "first", processed)
        lose(built.engine, team, num_steps=1)
        assert built.renewal is not None
        built.renewal.run()
        assert answer(built.engine, "first", processed) == right


def test_one_rank_has_nothing_to_renew(tiny_checkpoints: TinyCheckpoints) -> None:
    config = parse_args(
        {
            "model": {"path": str(tiny_checkpoints("llama")), "dtype": "float32"},
            "engine": {"kv_tokens": 512, "num_threads": 1},
        }
    )
    built = build_engine(config, show_progress=False)
    with suppress(EngineError):
        built.engine.close()
    assert built.renewal is None
