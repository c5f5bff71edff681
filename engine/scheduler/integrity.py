"""Whether rows, queues and pages of a scheduler agree; for tests and idle engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceABC

from remora.configs.errors import InvariantViolated
from remora.engine.kv.cache import KVCache
from remora.engine.scheduler.adapter_slots import AdapterSlots
from remora.engine.scheduler.sequence import Sequence


def check_rows(
    running: SequenceABC[Sequence], waiting: SequenceABC[Sequence], free_rows: Collection[int]
) -> None:
    """Raise InvariantViolated unless each running sequence has a row, and no waiting one."""
    rows = [seq.row for seq in running]
    if None in rows or len(set(rows)) != len(rows) or set(rows) & set(free_rows):
        raise InvariantViolated("two sequences share a row, or a row is both free and in use")
    if any(seq.row is not None or seq.table.pages for seq in waiting):
        raise InvariantViolated("a waiting sequence holds a row or pages")


def check_tokens(
    running: SequenceABC[Sequence],
    waiting: SequenceABC[Sequence],
    prompts: Collection[Sequence],
    num_waiting_tokens: int,
) -> None:
    """Raise InvariantViolated unless tokens are counted.

    prompts:             running sequences with more than one token to compute, or that had
    num_waiting_tokens:  to compute for waiting sequences
    """
    if num_waiting_tokens != sum(seq.num_queued_tokens for seq in waiting):
        raise InvariantViolated("the count of waiting tokens is wrong")
    behind = {seq for seq in running if seq.num_pending > 1 or not seq.prompt_is_computed}
    if not behind <= set(prompts) <= set(running):
        raise InvariantViolated("the set of sequences with prompts to compute is wrong")


def check_adapters(running: Iterable[Sequence], adapters: AdapterSlots) -> None:
    """Raise InvariantViolated unless the adapters in use are those of running sequences."""
    lora_ids = (seq.request.lora_id for seq in running)
    adapters.check_integrity(dict(Counter(lora_id for lora_id in lora_ids if lora_id)))


def check_pages(running: SequenceABC[Sequence], kv: KVCache) -> None:
    """Raise InvariantViolated unless sequences hold the pages that the cache counts."""
    kv.check_integrity()
    searches = {seq.beams for seq in running if seq.beams is not None}
    tables = [*(seq.table for seq in running), *(t for beams in searches for t in beams.tables)]
    owned = [page for table in tables for page in table.owned]
    if len(set(owned)) != len(owned) or len(owned) != kv.num_owned:
        raise InvariantViolated("a page is owned by two sequences, or by none")
    if any(seq.num_computed > len(seq.table.pages) * kv.page_size for seq in running):
        raise InvariantViolated("a sequence has computed more than its pages hold")
    if kv.windows is not None:
        kv.windows.check_users(
            Counter(page for table in tables for page in table.windows[table.first_window :])
        )
