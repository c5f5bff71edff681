"""A request is blocked for a while after several crashes; memory of crashes is bounded."""

from __future__ import annotations

from remora.deployments.gateway.crashes import MAX_KNOWN, REMEMBERED_S, CrashCounts, fingerprint


def test_a_request_is_barred_after_as_many_crashes_as_allowed_for_a_while() -> None:
    now = 0.0
    crashes = CrashCounts(max_crashes=2, clock=lambda: now)

    crashes.note(b"poison")
    assert not crashes.is_barred(b"poison")
    crashes.note(b"poison")
    assert crashes.is_barred(b"poison")
    assert not crashes.is_barred(b"other")
    assert "2" in crashes.message(b"poison")
    now = REMEMBERED_S + 1
    assert not crashes.is_barred(b"poison")


def test_only_the_latest_are_remembered() -> None:
    crashes = CrashCounts(max_crashes=1)

    for number in range(MAX_KNOWN + 1):
        crashes.note(str(number).encode())

    assert not crashes.is_barred(b"0")
    assert crashes.is_barred(b"1")


def test_a_repeated_request_is_known_again_and_no_other_is() -> None:
    prints = {fingerprint("/a", b"x"), fingerprint("/a", b"y"), fingerprint("/b", b"x")}

    assert len(prints) == 3
    assert fingerprint("/a", b"x") in prints


def test_an_answered_request_is_forgiven() -> None:
    crashes = CrashCounts(max_crashes=2)
    crashes.note(b"popular")
    crashes.forgive(b"popular")
    crashes.forgive(b"never seen")
    crashes.note(b"popular")

    assert not crashes.is_barred(b"popular")
