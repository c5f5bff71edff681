"""The verdict on what a client saw.

A request has a right answer, recorded from an undisturbed run. It must end with that answer, with a
definite error, or with a closed connection, and the last two only if a fault explains them. All
else is a defect of the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from tests.endurance.client import End, Seen
from tests.endurance.traffic import Ask

RETRIABLE_STATUSES = frozenset({429, 503, 504})
RETRIABLE_TYPES = frozenset({"overloaded_error", "rate_limit_error", "server_error"})
# A request that is sent while its kept-alive connection is being cut may never reach the proxy.
SENT_INTO_A_CUT_S = 0.02
MIN_TAIL_CHARS = 8  # of a text that goes on at another place of its answer
MIN_FOREIGN_CHARS = 24  # of another answer that a text must contain to be called mixed


class Verdict(StrEnum):
    """The outcome of a request; the first four are right."""

    WHOLE = "whole"
    ERROR = "error"  # definite and retriable
    CLOSED = "closed"
    LEFT = "left"  # by the client
    SHORT = "short"  # looks whole, but text is missing
    DOUBLED = "doubled"
    MIXED = "mixed"  # contains a part of another request's answer
    DIFFERENT = "different"
    TRUNCATED = "truncated"  # a stream that ended without [DONE], though HTTP says it is whole
    MALFORMED = "malformed"
    HANG = "hang"
    NOT_RETRIABLE = "not retriable"  # an error that a client would not retry
    UNEXPLAINED = "unexplained"  # an error or a closed connection that no fault explains
    NOT_RESUMED = "not resumed"  # though the gateway promises it


RIGHT = frozenset({Verdict.WHOLE, Verdict.ERROR, Verdict.CLOSED, Verdict.LEFT})


class Reach(Enum):
    """Which requests a fault may end."""

    NOTHING = "nothing"
    VICTIM = "those on the process"
    CUT = "those on cut connections"
    ALL = "all"


@dataclass(slots=True, kw_only=True)
class Outage:
    """The time from a fault until the server has recovered from it.

    pids:        processes whose requests it may end (Reach.VICTIM)
    rids:        requests whose connections it cut (Reach.CUT)
    is_resumed:  whether another replica completes requests that survive replicas
    """

    what: str
    reach: Reach
    began_at: float
    ended_at: float = float("inf")
    pids: frozenset[int] = frozenset()
    rids: Set[str] = frozenset()
    is_resumed: bool = False

    def touches(self, seen: Seen) -> bool:
        """Whether the request was running during the outage."""
        return seen.began_at <= self.ended_at and seen.ended_at >= self.began_at


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client must receive: (text, calls, finish reason) of each choice, and the usage."""

    choices: tuple[tuple[str, str, str | None], ...]
    usage: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, seen: Seen) -> Answer:
        """Return the answer in what a client saw."""
        choices = [
            (choice.text, repr(sorted(choice.calls.items())), choice.finish_reason)
            for _, choice in sorted(seen.choices.items())
        ]
        counts = {
            key: seen.usage[key]
            for key in ("prompt_tokens", "completion_tokens")
            if seen.usage is not None and key in seen.usage
        }
        return cls(tuple(choices), tuple(sorted(counts.items())))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(text for text, _, _ in self.choices)


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict and its reason."""

    verdict: Verdict
    reason: str = ""

    @property
    def is_right(self) -> bool:
        return self.verdict in RIGHT


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the right answers, the faults, and which process served what.

    asks:     requests by name
    answers:  right answers by name
    owners:   by rid, the process that reported the end of the request. A request without one ended
              with its process
    """

    asks: Mapping[str, Ask]
    answers: Mapping[str, Answer]
    outages: Sequence[Outage] = ()
    owners: Mapping[str, int] = field(default_factory=dict)

    def judge(self, seen: Seen) -> Finding:
        """Return the verdict on a request."""
        ask = self.asks[seen.name]
        if seen.end is End.TIMEOUT:
            return Finding(Verdict.HANG, f"no end after {seen.ended_at - seen.began_at:.1f} s")
        if seen.problems or seen.end is End.UNREADABLE:
            return Finding(Verdict.MALFORMED, "; ".join([*seen.problems, seen.detail]))
        if seen.error is not None or (seen.status or 0) >= 400:
            return self._of_error(ask, seen)
        if seen.end in (End.CLOSED, End.UNREACHED, End.LEFT):
            return self._of_unfinished(ask, seen)
        if seen.end is End.UNFINISHED:
            return Finding(Verdict.TRUNCATED, "no [DONE] and no error")
        if ask.status != 200:
            return Finding(Verdict.DIFFERENT, f"status {seen.status}, not {ask.status}")
        return self._of_answer(seen)

    def _of_answer(self, seen: Seen) -> Finding:
        found, right = Answer.of(seen), self.answers[seen.name]
        if found == right:
            return Finding(Verdict.WHOLE)
        for text, expected in zip(found.texts, right.texts, strict=False):
            if text != expected:
                return self._of_wrong_text(seen.name, text, expected)
        return Finding(Verdict.DIFFERENT, f"{found} instead of {right}"[:400])

    def _of_wrong_text(self, name: str, text: str, expected: str) -> Finding:
        place = _common_prefix(text, expected)
        where = f"at character {place} of {len(expected)}: {text[place : place + 60]!r}"
        if expected.startswith(text):
            return Finding(Verdict.SHORT, f"{len(text)} of {len(expected)} characters")
        again = expected.find(text[place:]) if len(text) - place >= MIN_TAIL_CHARS else -1
        if again >= 0:
            return Finding(Verdict.DOUBLED if again < place else Verdict.SHORT, where)
        tail = text[place : place + MIN_FOREIGN_CHARS]
        for other, answer in self.answers.items():
            is_foreign = other != name and any(tail in foreign for foreign in answer.texts)
            if is_foreign and len(tail) == MIN_FOREIGN_CHARS:
                return Finding(Verdict.MIXED, f"{where}, from {other}")
        return Finding(Verdict.DIFFERENT, where)

    def _of_part(self, seen: Seen) -> Finding | None:
        """Return what is wrong with the text before an end that is not a whole answer."""
        right = self.answers.get(seen.name)
        if right is None:
            return None
        for index, choice in seen.choices.items():
            expected = right.texts[index] if index < len(right.texts) else ""
            if not expected.startswith(choice.text):
                return self._of_wrong_text(seen.name, choice.text, expected)
        return None

    def _of_error(self, ask: Ask, seen: Seen) -> Finding:
        error = seen.error or {}
        if not error.get("message") or not error.get("type"):
            return Finding(Verdict.MALFORMED, f"status {seen.status} with the error {error}")
        if ask.status == seen.status != 200 or (ask.may_be_missing and seen.status == 404):
            return Finding(Verdict.WHOLE)
        if (wrong := self._of_part(seen)) is not None:
            return wrong
        reason = f"status {seen.status}: {error}"
        is_event = seen.status == 200
        if error["type"] not in RETRIABLE_TYPES or not (
            is_event or (seen.status in RETRIABLE_STATUSES and seen.may_retry)
        ):
            return Finding(Verdict.NOT_RETRIABLE, reason)
        return self._explained(Verdict.ERROR, ask, seen, reason, is_refusal=not is_event)

    def _of_unfinished(self, ask: Ask, seen: Seen) -> Finding:
        if (wrong := self._of_part(seen)) is not None:
            return wrong
        if seen.end is End.LEFT:
            return Finding(Verdict.LEFT)
        is_refusal = seen.end is End.UNREACHED
        return self._explained(Verdict.CLOSED, ask, seen, seen.detail, is_refusal=is_refusal)

    def _explained(
        self, verdict: Verdict, ask: Ask, seen: Seen, reason: str, *, is_refusal: bool
    ) -> Finding:
        explanations = [
            outage for outage in self.outages if self._explains(outage, seen, is_refusal)
        ]
        if not explanations:
            owner = self.owners.get(seen.rid)
            served = f"; process {owner} served it" if owner is not None else ""
            return Finding(Verdict.UNEXPLAINED, f"{seen.end}: {reason}{served}")
        if ask.survives_replicas and all(outage.is_resumed for outage in explanations):
            return Finding(Verdict.NOT_RESUMED, f"{seen.end}: {reason}")
        return Finding(verdict, f"{explanations[0].what}: {reason}")

    def _explains(self, outage: Outage, seen: Seen, is_refusal: bool) -> bool:
        if not outage.touches(seen):
            return False
        if outage.reach is Reach.CUT:
            is_lost = seen.first_at is None and seen.end is End.CLOSED
            age_s = abs(seen.began_at - outage.began_at)
            return seen.rid in outage.rids or (is_lost and age_s < SENT_INTO_A_CUT_S)
        if outage.reach is Reach.VICTIM and not is_refusal:
            owner = self.owners.get(seen.rid)
            return owner is None or owner in outage.pids
        return outage.reach is not Reach.NOTHING


def _common_prefix(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def count(findings: Iterable[Finding]) -> dict[str, int]:
    """Count verdicts."""
    counts: dict[str, int] = {}
    for finding in findings:
        counts[str(finding.verdict)] = counts.get(str(finding.verdict), 0) + 1
    return counts
