"""Slots of adapters: nobody in use is put out, and everybody gets a turn."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import InvariantViolated
from remora.engine.scheduler.adapter_slots import AdapterSlots, Eviction

# Of which adapter a sequence starts, or that the first one that runs ends.
EVENTS = st.lists(st.one_of(st.integers(1, 6), st.none()), max_size=80)


@given(events=EVENTS, num_slots=st.integers(1, 4), eviction=st.sampled_from(["lru", "fifo"]))
def test_a_slot_in_use_is_never_given_to_another(
    events: list[int | None], num_slots: int, eviction: Eviction
) -> None:
    slots = AdapterSlots(num_slots, eviction=eviction)
    running: list[tuple[int, int]] = []
    held: dict[int, int] = {}  # slot -> instance, as a rank would have it
    for event in events:
        if event is None:
            if running:
                slots.release(running.pop(0)[0])
        elif slots.has_room(event):
            slot, is_new = slots.acquire(event)
            assert is_new == (held.get(slot) != event)
            if is_new:
                assert all(of != slot for _, of in running)
                held[slot] = event
            running.append((event, slot))
        else:
            assert len({lora_id for lora_id, _ in running}) == num_slots
        slots.check_integrity(dict(Counter(lora_id for lora_id, _ in running)))
        assert all(held[slot] == lora_id for lora_id, slot in running)


def use(slots: AdapterSlots, *lora_ids: int) -> list[bool]:
    """Run one sequence of each to its end; returns which had to be loaded."""
    loaded = []
    for lora_id in lora_ids:
        loaded.append(slots.acquire(lora_id)[1])
        slots.release(lora_id)
    return loaded


@pytest.mark.parametrize(
    ("eviction", "used"), [("lru", [1, 2, 1, 3, 1, 2]), ("fifo", [1, 2, 1, 3, 2, 1])]
)
def test_the_least_recently_used_or_the_first_loaded_goes_first(
    eviction: Eviction, used: list[int]
) -> None:
    slots = AdapterSlots(2, eviction=eviction)

    assert use(slots, *used) == [True, True, False, True, False, True]
    assert (slots.num_loads, slots.num_evicted) == (4, 2)


def test_what_is_forgotten_leaves_its_slot_to_others() -> None:
    slots = AdapterSlots(1)
    use(slots, 1)

    slots.forget(1)
    slots.forget(7)

    assert use(slots, 2) == [True]
    assert slots.num_evicted == 0


def test_an_adapter_in_use_cannot_be_forgotten_nor_released_twice() -> None:
    slots = AdapterSlots(1)
    slots.acquire(1)

    with pytest.raises(InvariantViolated, match="in use"):
        slots.forget(1)
    slots.release(1)
    with pytest.raises(InvariantViolated, match="more often"):
        slots.release(1)


def test_slots_whose_contents_are_lost_are_free_and_pins_stay() -> None:
    slots = AdapterSlots(2)
    slots.acquire(1)
    with pytest.raises(InvariantViolated, match="in use"):
        slots.clear()
    slots.release(1)
    use(slots, 2)
    slots.pin(2, pinned=True)

    slots.clear()

    slots.check_integrity({})
    assert slots.by_lora_id == {}
    assert use(slots, 2, 1, 3, 2) == [True, True, True, False]
    assert slots.num_evicted == 1
