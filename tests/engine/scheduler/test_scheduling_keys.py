"""What the keys of order, pace and reserve do to the steps of an engine."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.engine.loop import EngineLoop, Stepping
from remora.engine.scheduler.admission_order import MAX_PASSED
from remora.engine.types import Request, SamplingParams
from tests.engine.configured import configured, plan_for
from tests.engine.fakes import expected_output, make_engine
from tests.engine.scheduler.scheduled import Harness, make_request

WAIT_S = 30


def steps_of(harness: Harness) -> list[list[int]]:
    """Return the tokens of each row of each step."""
    return [plan.num_tokens.tolist() for plan in harness.runner.plans]


def started(harness: Harness) -> list[int]:
    """Return the first token of each sequence in the order of starting."""
    return [int(init.token_ids[0]) for plan in harness.runner.plans for init in plan.added]


def behind_one_that_runs(**keys: Any) -> Harness:
    """Make an engine with a single row, which is taken."""
    harness = configured(max_running_requests=1, **keys)
    harness.add("first", [49], 3)
    harness.step()
    return harness


def warm(harness: Harness, *prompts: list[int]) -> None:
    """Put prompts into the prefix cache."""
    for number, prompt in enumerate(prompts):
        harness.add(f"warm {number}", prompt, 1)
        harness.run()


# -- order -----------------------------------------------------------------------------------


@pytest.mark.observes("engine.schedule_policy")
def test_longest_cached_prefix_first() -> None:
    orders = {}
    for policy in ("fcfs", "lpm"):
        harness = configured(max_running_requests=1, schedule_policy=policy)
        warm(harness, [1] * 4, [2] * 12, [3] * 8)
        for token in (9, 1, 3, 2):
            harness.add(f"r{token}", [token] * 13, 2)
        harness.run()
        orders[policy] = started(harness)[3:]

    assert orders == {"fcfs": [9, 1, 3, 2], "lpm": [2, 3, 1, 9]}


def test_prefixes_that_many_share_are_served_together() -> None:
    harness = configured(
        max_running_requests=8, max_step_tokens=64, schedule_policy="dfs-weight", kv_tokens=256
    )
    rare, shared = [1] * 8, [2] * 4
    warm(harness, rare, [*shared, *[3] * 4], [*shared, *[4] * 4])
    prompts = {
        "rare": [*rare, 9, 9],
        "stem": [*shared, 9, 9],
        "branch 3": [*shared, *[3] * 4, 9, 9],
        "branch 4": [*shared, *[4] * 4, 9, 9],
        "branch 4 too": [*shared, *[4] * 4, 8, 8],
        "other": [5, 5],
    }
    for name, prompt in prompts.items():
        harness.add(name, prompt, 2)

    harness.step()

    names = {tuple(prompt): name for name, prompt in prompts.items()}
    order = [names[tuple(init.token_ids)] for init in harness.runner.plans[-1].added]
    assert order == ["branch 4", "branch 4 too", "branch 3", "stem", "rare", "other"]


def test_random_order_is_that_of_the_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        harness = behind_one_that_runs(schedule_policy="random", random_seed=seed)
        for token in range(1, 13):
            harness.add(f"r{token}", [token], 2)
        harness.run()
        orders.append(started(harness)[1:])

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(1, 13)) != orders[2]


def test_a_policy_passes_nobody_over_for_ever() -> None:
    harness = behind_one_that_runs(schedule_policy="lof")
    harness.add("short", [1], 2)
    numbers = itertools.count()
    while ("short", 0) not in harness.ends:
        for _ in range(2):
            harness.add(f"long {next(numbers)}", [2], 4)
        harness.step()

    assert started(harness).index(1) == 1 + MAX_PASSED


@pytest.mark.observes("engine.use_priorities", "engine.low_priority_first")
@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ({}, [2, 1, 3]),
        ({"use_priorities": True}, [2, 1, 3]),
        ({"use_priorities": False}, [1, 2, 3]),
        ({"low_priority_first": True}, [1, 3, 2]),
        ({"low_priority_first": False}, [2, 1, 3]),
        ({"schedule_policy": "lof"}, [2, 3, 1]),
        ({"schedule_policy": "lof", "use_priorities": False}, [3, 1, 2]),
    ],
)
def test_priorities_may_be_ignored_or_reversed(keys: dict[str, Any], order: list[int]) -> None:
    harness = behind_one_that_runs(**keys)
    for token, max_tokens, priority in ((1, 5, 0), (2, 2, 9), (3, 7, 0)):
        harness.add(f"r{token}", [token], max_tokens, priority=priority)

    harness.run()

    assert started(harness)[1:] == order


@pytest.mark.observes("engine.priority_preemption_gap")
@pytest.mark.parametrize(("gap", "preempted"), [(None, 0), (2, 1), (3, 0)])
def test_preemption_needs_more_than_the_gap(gap: int | None, preempted: int) -> None:
    harness = behind_one_that_runs(priority_preemption_gap=gap)
    harness.add("urgent", [1], 2, priority=3)

    harness.run()

    assert harness.engine.stats().preemptions_total == preempted
    assert harness.tokens["first", 0] == expected_output([49], 3)


def test_who_gives_way_keeps_what_it_has_computed_while_memory_lasts() -> None:
    harness = behind_one_that_runs(priority_preemption_gap=0)
    harness.run()
    harness.add("low", [2] * 8, 20)
    harness.step(6)
    harness.add("urgent", [3] * 4, 3, priority=1)

    harness.run()

    starts = [
        int(plan.starts[plan.rows.tolist().index(init.row)])
        for plan in harness.runner.plans
        for init in plan.added
        if init.token_ids[0] == 2
    ]
    assert starts == [0, 12]  # of 14 tokens, in whole pages
    assert harness.tokens["low", 0] == expected_output([2] * 8, 20)


# -- numbers and pace ------------------------------------------------------------------------


@pytest.mark.observes("engine.max_running_requests", "engine.max_step_tokens")
@pytest.mark.parametrize(
    ("keys", "length", "most_rows", "most_tokens"),
    [({"max_running_requests": 3}, 1, 3, 3), ({"max_step_tokens": 11}, 20, 4, 11)],
)
def test_a_step_has_no_more_rows_and_tokens_than_it_may(
    keys: dict[str, Any], length: int, most_rows: int, most_tokens: int
) -> None:
    harness = configured(**keys)
    for number in range(8):
        harness.add(f"r{number}", [number + 1] * length, 4)

    harness.run()

    steps = steps_of(harness)
    assert (max(map(len, steps)), max(map(sum, steps))) == (most_rows, most_tokens)


@pytest.mark.observes(
    "engine.prefill_chunk_tokens", "engine.max_prefill_tokens", "engine.max_prefill_requests"
)
@pytest.mark.parametrize(
    ("keys", "lengths", "first_steps"),
    [
        ({"prefill_chunk_tokens": 6}, [20], [[6], [6], [6], [2], [1]]),
        ({"max_prefill_tokens": 5}, [8, 8], [[5], [3, 2], [1, 5], [1, 1]]),
        ({"max_prefill_requests": 2}, [3] * 4, [[3, 3], [1, 1, 3, 3], [1, 1, 1, 1]]),
    ],
)
def test_prompts_have_chunks_and_budgets_of_their_own(
    keys: dict[str, Any], lengths: list[int], first_steps: list[list[int]]
) -> None:
    harness = configured(**keys)
    for number, length in enumerate(lengths):
        harness.add(f"r{number}", [number + 1] * length, 4)

    harness.run()

    assert steps_of(harness)[: len(first_steps)] == first_steps


@pytest.mark.observes("engine.chunked_prefill")
def test_a_prompt_that_may_not_be_divided_waits_for_room() -> None:
    harness = configured(
        chunked_prefill=False, max_step_tokens=128, without=("prefill_chunk_tokens",), kv_tokens=512
    )
    harness.add("long", [1] * 100, 2)
    harness.add("short", [2] * 30, 2)

    harness.run()

    assert steps_of(harness) == [[100], [1, 30], [1]]
    assert harness.tokens["short", 0] == expected_output([2] * 30, 2)


def test_steps_must_hold_prompts_that_may_not_be_divided() -> None:
    unwritten = ("max_step_tokens", "prefill_chunk_tokens")
    grown = plan_for(chunked_prefill=False, max_position=600, without=unwritten)
    assert grown.max_step_tokens == 600

    with pytest.raises(ConfigError, match=r"up to 128 tokens.*max_step_tokens is 16"):
        plan_for(chunked_prefill=False, without=("prefill_chunk_tokens",))


@pytest.mark.observes("engine.mixed_steps")
@pytest.mark.parametrize(
    ("mixed", "steps"),
    [
        (True, [[2], [1, 8], [1, 8], [1, 1], [1, 1]]),
        (False, [[2], [8], [8], [1, 1], [1, 1], [1]]),
    ],
)
def test_prompts_may_have_steps_of_their_own(mixed: bool, steps: list[list[int]]) -> None:
    harness = configured(mixed_steps=mixed)
    harness.add("decodes", [1, 2], 5 if mixed else 4)
    harness.step()
    harness.add("prompt", [3] * 16, 3)

    harness.run()

    assert steps_of(harness) == steps
    assert harness.tokens["prompt", 0] == expected_output([3] * 16, 3)


@pytest.mark.observes("engine.admission_interval_steps")
@pytest.mark.parametrize(("interval", "waited"), [(1, 0), (4, 3)])
def test_a_busy_engine_looks_at_the_queue_every_so_many_steps(interval: int, waited: int) -> None:
    harness = configured(admission_interval_steps=interval)
    harness.add("runs", [1], 20)
    harness.step()
    harness.add("waits", [2], 2)

    seen = []
    for _ in range(waited + 1):
        harness.step()
        seen.append(harness.engine.stats().num_waiting)

    assert seen == [1] * waited + [0]


@pytest.mark.observes("engine.admission_interval_s")
@pytest.mark.parametrize(("interval_s", "num_waiting"), [(0.0, 0), (5.0, 1)])
def test_a_busy_engine_looks_at_the_queue_every_so_many_seconds(
    interval_s: float, num_waiting: int
) -> None:
    now = itertools.count(step=0.25)
    plan = plan_for(admission_interval_s=interval_s)
    engine = make_engine(plan, clock=lambda: next(now))
    engine.add(make_request("runs", [1], 60))
    engine.step()
    engine.add(make_request("waits", [2], 2))

    seen = []
    for _ in range(21):
        engine.step()
        seen.append(engine.stats().num_waiting)

    assert (seen[0], seen[-1]) == (num_waiting, 0)


@pytest.mark.observes("engine.poll_interval_steps")
@pytest.mark.parametrize("interval", [1, 3])
def test_a_busy_engine_takes_in_what_arrives_every_so_many_steps(interval: int) -> None:
    plan = plan_for(poll_interval_steps=interval, kv_tokens=4096)
    engine = make_engine(plan)
    seen: list[int] = []
    done = threading.Event()

    def note(engine: Stepping) -> None:
        seen.append(engine.stats().steps_total)
        if len(seen) < 4:
            loop.submit(note)
        else:
            done.set()

    loop = EngineLoop(
        engine,
        deliver=lambda outputs: None,
        on_failure=lambda error: None,
        step_timeout_s=WAIT_S,
        poll_interval_steps=plan.scheduling.poll_interval_steps,
    )
    request = Request(request_id="r", prompt_ids=[1], sampling=SamplingParams(max_tokens=100))
    loop.submit(lambda engine: engine.add(request))
    loop.submit(note)
    loop.start()

    assert done.wait(WAIT_S)
    loop.close()
    assert seen == [0, interval, 2 * interval, 3 * interval]


# -- what is reserved for output -------------------------------------------------------------


LOW = {"schedule_conservativeness": 0.1}


@pytest.mark.observes(
    "engine.schedule_conservativeness",
    "engine.expected_output_tokens",
    "engine.full_reserve_usage",
    "engine.min_reserved_tokens",
    "engine.free_kv_fraction",
)
@pytest.mark.parametrize(
    ("keys", "together"),
    [
        (LOW, 4),
        ({"schedule_conservativeness": 1.0}, 2),
        ({"expected_output_tokens": 5}, 4),
        ({"expected_output_tokens": 30}, 3),
        ({"expected_output_tokens": 60}, 2),
        (LOW | {"full_reserve_usage": 0.9}, 4),
        (LOW | {"full_reserve_usage": 0.05}, 2),
        (LOW | {"full_reserve_usage": 0.0}, 2),
        (LOW | {"min_reserved_tokens": 30}, 3),
        (LOW | {"min_reserved_tokens": 1000}, 2),  # no more than the output may have
        (LOW | {"free_kv_fraction": 0.85}, 2),
        (LOW | {"free_kv_fraction": 0.95}, 1),
    ],
)
def test_fewer_start_together_the_more_is_reserved(keys: dict[str, Any], together: int) -> None:
    """Of four requests with 4 tokens each and outputs of 60, where 128 tokens fit."""
    harness = configured(**keys)
    for number in range(4):
        harness.add(f"r{number}", [number + 1] * 4, 60)
    harness.step()

    assert harness.engine.stats().num_running == together
    harness.run()
    for number in range(4):
        assert harness.tokens[f"r{number}", 0] == expected_output([number + 1] * 4, 60)


# -- contradictions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"use_priorities": False, "low_priority_first": True}, "low_priority_first"),
        ({"use_priorities": False, "priority_preemption_gap": 1}, "priority_preemption_gap"),
        ({"chunked_prefill": False, "prefill_chunk_tokens": 8}, "prefill_chunk_tokens"),
        ({"max_prefill_tokens": 17}, "max_prefill_tokens"),
        (
            {"expected_output_tokens": 9, "schedule_conservativeness": 1.0},
            "schedule_conservativeness",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.{reason} "):
        plan_for(**keys)
