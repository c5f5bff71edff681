"""What is asked of simulated replicas: lone requests, conversations, adapters; from seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from remora.deployments.routing.key import RouteKey

TOKEN = 7  # what every answer consists of


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """A request on its way.

    after:  what follows when its answer is complete: seconds to wait, and the next call
    """

    prompt: list[int]
    num_output: int
    session: str | None = None
    adapter: str | None = None
    after: tuple[float, Callable[[Call], Call]] | None = None
    arrived_s: float = 0.0
    first_token_s: float | None = None
    replica: str = ""
    router: int = 0
    key: RouteKey = field(default_factory=RouteKey)


def skewed_load(num_calls: int, rate: float, *, seed: int) -> list[tuple[float, Call]]:
    """Return calls at random times, `rate` a second: one long prompt to nine short ones."""
    chance = random.Random(seed)
    at_s, calls = 0.0, []
    for _ in range(num_calls):
        at_s += chance.expovariate(rate)
        is_long = chance.random() < 0.1
        num_prompt = chance.randint(1500, 2000) if is_long else chance.randint(32, 96)
        prompt = [chance.randrange(1, 50_000) for _ in range(num_prompt)]
        calls.append((at_s, Call(prompt=prompt, num_output=chance.randint(16, 48))))
    return calls


def conversations(
    count: int, num_turns: int, *, seed: int, shared_tokens: int = 0, pause_s: float = 4.0
) -> list[tuple[float, Call]]:
    """Return the first turns of conversations; each turn begins with all that was said before.

    shared_tokens:  tokens that all begin with, such as a system prompt
    """
    chance = random.Random(seed)
    shared = [chance.randrange(1, 50_000) for _ in range(shared_tokens)]

    def say(before: list[int], turns_left: int, session: str) -> Call:
        words = [chance.randrange(1, 50_000) for _ in range(chance.randint(40, 160))]

        def go_on(call: Call) -> Call:
            answered = call.prompt + [TOKEN] * call.num_output
            return say(answered, turns_left - 1, session)

        return Call(
            prompt=before + words,
            num_output=chance.randint(32, 96),
            session=session,
            after=(chance.expovariate(1 / pause_s), go_on) if turns_left > 1 else None,
        )

    return [
        (chance.uniform(0, pause_s), say(shared, num_turns, f"conversation {n}"))
        for n in range(count)
    ]


def adapter_load(
    num_calls: int, rate: float, *, seed: int, num_adapters: int = 60, hot_share: float = 0.0
) -> list[tuple[float, Call]]:
    """Return calls at random times, each for an adapter: the nth is asked for 1/n as often.

    hot_share:  of the calls are for the first one, whatever else
    """
    chance = random.Random(seed)
    names = [f"adapter {number}" for number in range(num_adapters)]
    weights = [1 / (number + 1) for number in range(num_adapters)]
    at_s, calls = 0.0, []
    for _ in range(num_calls):
        at_s += chance.expovariate(rate)
        (name,) = chance.choices(names, weights)
        call = Call(
            prompt=[chance.randrange(1, 50_000) for _ in range(chance.randint(32, 256))],
            num_output=chance.randint(16, 64),
            adapter=names[0] if chance.random() < hot_share else name,
        )
        calls.append((at_s, call))
    return calls
