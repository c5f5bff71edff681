"""How many drafts a row may have: the controller seam, a fixed and an adaptive controller.

Every draft adds a row to the step that verifies it, and a step's time grows with its rows. Knows
counts and seconds; it does not know tokens, proposers or models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from remora.engine.spec.step_cost import StepCost

_FIRST_RATE = 0.5  # acceptance rate of every position before any row was observed
_ROW_WEIGHT = 0.05  # least weight of an outcome in a row's rates
_ALL_WEIGHT = 0.01  # the same in the rates of all rows
_STEP_WEIGHT = 0.2  # of a step in a row's average draft length
_PRIOR_OUTCOMES = 3  # outcomes that a first rate counts as
_LEAST_GAIN = 1.02  # drafts must gain more than the noise of measured times
_PROBE_INTERVAL = 16  # steps between probes of a row, doubled by each that fails
_LONGEST_INTERVAL = 128
_NUM_DRAFT_TIMES = 9  # of which the median counts


class Controller(Protocol):
    """Chooses draft lengths. Called from the engine's thread only.

    Each step calls `limit` for every row that may have drafts, then, once their tokens are known,
    `observe` for each of them, and at last `observe_step`.
    """

    def limit(self, key: int, num_rows: int, *, is_free: bool = False) -> int:
        """Return the most drafts for a sequence in the next step; 0 = none.

        num_rows:  sequences that decode in this step, this one included
        is_free:   whether its drafts take no time to make
        """

    def observe(
        self, key: int, proposed: int, accepted: int, *, is_predicted: bool = False
    ) -> None:
        """Learn the outcome of one row, also if nothing was proposed.

        proposed:      drafts that were verified
        accepted:      how many of them, from the first on, became output
        is_predicted:  whether its request brought them, so that they say nothing of other rows
        """

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Learn the time of a step that computed no prompt tokens, without drafting.

        num_tokens:  tokens computed: one for each row, and the drafts
        """

    def observe_drafting(self, num_drafts: int, seconds: float) -> None:
        """Learn the time that drafting took in a step.

        num_drafts:  of the row with the most
        """

    def end(self, key: int) -> None:
        """Forget a sequence; unknown keys are ignored."""


class FixedController:
    """Always the same draft length."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def limit(self, key: int, num_rows: int, *, is_free: bool = False) -> int:
        """Return the draft length."""
        return self._num_drafts

    def observe(
        self, key: int, proposed: int, accepted: int, *, is_predicted: bool = False
    ) -> None:
        """Do nothing."""

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Do nothing."""

    def observe_drafting(self, num_drafts: int, seconds: float) -> None:
        """Do nothing."""

    def end(self, key: int) -> None:
        """Do nothing."""


class _Rates:
    """Acceptance rates by position, of drafts whose predecessors were accepted.

    A mean of the first outcomes, then a moving average.
    """

    def __init__(self, first: Sequence[float], weight: float) -> None:
        self.values = list(first)
        self._num_outcomes = [0] * len(self.values)
        self._weight = weight

    def observe(self, proposed: int, accepted: int) -> None:
        """Add the outcomes of a row's drafts, up to the first that was refused."""
        for position in range(min(proposed, accepted + 1, len(self.values))):
            self._num_outcomes[position] += 1
            mean = 1 / (self._num_outcomes[position] + _PRIOR_OUTCOMES)
            outcome = 1.0 if position < accepted else 0.0
            self.values[position] += max(self._weight, mean) * (outcome - self.values[position])


@dataclass(slots=True)
class _Row:
    """State of a sequence.

    num_drafts:    verified per step, lately; averaged, or rows that react to each other's latest
                   step would all draft and all stop in turns
    num_accepted:  of these
    """

    rates: _Rates
    num_drafts: float = 0.0
    num_accepted: float = 0.0
    is_probed: bool = False
    steps_to_probe: int = 1
    probe_interval: int = _PROBE_INTERVAL


class AdaptiveController:
    """Chooses the draft length with the most tokens per second, by what was measured.

    The tokens that a draft length yields follow from the row's acceptance rates by position, the
    seconds from the times of steps by their number of tokens, other rows' drafts included. A row's
    first rates are those of all rows before it. Now and then a row may have one draft more than is
    best, to notice changes; rows that fail such probes get fewer of them.

    max_drafts:  upper limit of a draft length
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._cost = StepCost()
        self._draft_times: deque[float] = deque(maxlen=_NUM_DRAFT_TIMES)
        self._draft_s = 0.0
        self._rates = _Rates([_FIRST_RATE] * max_drafts, _ALL_WEIGHT)  # of all rows
        self._rows: dict[int, _Row] = {}
        self._num_drafts = 0.0  # of all rows in a step
        self._num_accepted = 0.0  # the same, accepted

    def limit(self, key: int, num_rows: int, *, is_free: bool = False) -> int:
        """Return the draft length with the most tokens per second, or one more as a probe."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(_Rates(self._rates.values, _ROW_WEIGHT))
        best = self._best(row, num_rows, 0.0 if is_free else self._draft_s)
        row.is_probed = False
        if best < self._max_drafts:
            row.steps_to_probe -= 1
            if row.steps_to_probe <= 0:
                row.is_probed = True
                return best + 1
        return best

    def observe(
        self, key: int, proposed: int, accepted: int, *, is_predicted: bool = False
    ) -> None:
        """Learn acceptance rates of the row, and of all rows unless the drafts were predicted."""
        row = self._rows.get(key)
        if row is None:
            return
        row.rates.observe(proposed, accepted)
        if not is_predicted:
            self._rates.observe(proposed, accepted)
        if row.is_probed and proposed:
            is_success = accepted >= proposed
            row.probe_interval = (
                _PROBE_INTERVAL if is_success else min(2 * row.probe_interval, _LONGEST_INTERVAL)
            )
            row.steps_to_probe = 1 if is_success else row.probe_interval
        self._replace(
            row,
            row.num_drafts + _STEP_WEIGHT * (proposed - row.num_drafts),
            row.num_accepted + _STEP_WEIGHT * (accepted - row.num_accepted),
        )

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Learn the time of a step."""
        self._cost.observe(num_tokens, seconds)

    def observe_drafting(self, num_drafts: int, seconds: float) -> None:
        """Learn the time of a draft, which the rows of a step share."""
        self._draft_times.append(seconds / num_drafts)
        self._draft_s = median(self._draft_times)

    def end(self, key: int) -> None:
        """Forget a sequence."""
        if (row := self._rows.pop(key, None)) is not None:
            self._replace(row, 0, 0)

    def _replace(self, row: _Row, num_drafts: float, num_accepted: float) -> None:
        """Replace a row's part of the sums over all rows."""
        self._num_drafts += num_drafts - row.num_drafts
        self._num_accepted += num_accepted - row.num_accepted
        row.num_drafts, row.num_accepted = num_drafts, num_accepted

    def _best(self, row: _Row, num_rows: int, draft_s: float) -> int:
        """Return the draft length with the most tokens per second; others as lately.

        draft_s:  seconds of a draft, which the rows share
        """
        others = max(0.0, self._num_drafts - row.num_drafts)
        num_tokens = num_rows + round(others)
        output = num_rows + self._num_accepted - row.num_accepted
        best, most = 0, _LEAST_GAIN * output / self._cost.seconds(num_tokens)
        survival = 1.0
        for count, rate in enumerate(row.rates.values, start=1):
            survival *= rate
            output += survival
            drafting_s = draft_s * count * count / (count + others)  # the row's share
            speed = output / (self._cost.seconds(num_tokens + count) + drafting_s)
            if speed > most:
                best, most = count, speed
        return best
