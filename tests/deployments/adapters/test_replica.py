"""What a replica holds of adapters that come and go, as the operator says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remora.configs.load import parse_args
from remora.deployments.adapters import replica as module
from remora.deployments.adapters.replica import ReplicaAdapters
from tests.deployments.fakes import make_plan
from tests.lora.fake_loader import FakeLoader, record, wanted


@pytest.mark.observes("lora.max_loaded_loras", "lora.eviction")
@pytest.mark.parametrize(("eviction", "left"), [("lru", {1, 3}), ("fifo", {2, 3})])
async def test_the_operator_says_how_many_are_held_and_who_leaves_first(
    eviction: str, left: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = FakeLoader()
    monkeypatch.setattr(module, "RankLoader", lambda *_args: loader)
    lora = {"dynamic": True, "max_loaded_loras": 2, "max_loras_per_batch": 2, "eviction": eviction}
    built = SimpleNamespace(adapters=object(), plan=make_plan())
    launched: Any = SimpleNamespace(built=built, client=SimpleNamespace(adapter_slots=dict))
    manager: Any = None
    config = parse_args({"model": {"path": "base"}, "lora": lora})

    adapter_cache = ReplicaAdapters(config, launched, None, manager, "r1").adapter_cache
    adapter_cache.adopt(wanted(*map(record, (1, 2, 3))))
    await adapter_cache.settled()
    for version in (1, 2, 1, 3):
        async with adapter_cache.use(version):
            pass
    await adapter_cache.settled()

    assert loader.loaded == left
