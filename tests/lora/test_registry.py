"""The desired set: names, versions, owners, and what outlives the process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import ConfigError, InvalidRequest, UnknownModel
from remora.lora import registry as module
from remora.lora.records import Desired
from remora.lora.registry import Registry


def make(store: Path | None = None, *, max_pinned: int = 2) -> Registry:
    return Registry(None if store is None else str(store), base="base", max_pinned=max_pinned)


def served(registry: Registry) -> dict[str, int]:
    return {record.name: record.lora_id for record in registry.records}


def load(registry: Registry, name: str, source: str = "/a", *, pinned: bool = False) -> int:
    staged = registry.stage(name, source, owner="api", pinned=pinned)
    return registry.commit(staged.lora_id, "digest").lora_id


def test_a_staged_version_is_not_served_before_it_is_committed() -> None:
    registry = make()
    old = load(registry, "a")
    staged = registry.stage("a", "/new", owner="api")
    assert served(registry) == {"a": old}
    assert [record.lora_id for record in registry.desired().staged] == [staged.lora_id]
    registry.commit(staged.lora_id, "d")
    assert served(registry) == {"a": staged.lora_id}
    assert not registry.desired().staged


def test_what_was_loaded_outlives_the_process(tmp_path: Path) -> None:
    first = make(tmp_path / "deep" / "store")
    lora_id = load(first, "a", "/place", pinned=True)
    load(first, "b")
    first.remove("b")
    first.close()

    second = make(tmp_path / "deep" / "store")
    (record,) = second.records
    assert (record.name, record.lora_id, record.source) == ("a", lora_id, "/place")
    assert (record.pinned, record.owner, record.digest) == (True, "api", "digest")
    assert not second.is_new
    assert load(second, "c") > lora_id + 1  # that of "b" is not drawn again


def test_a_lost_store_draws_no_version_again() -> None:
    first, second = make(), make()
    lora_id = load(first, "a")
    while load(second, "b") < lora_id:
        pass  # the same millisecond
    assert second.is_new
    second.restore(first.records)
    assert served(second)["a"] == lora_id


@pytest.mark.parametrize("name", ["../x", "", "a/b", "a b", ".a", "a" * 129, "é", "a\n", "base"])
def test_names_that_no_adapter_can_have(name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        make().stage(name, "/a", owner="api")
    assert raised.value.param == "lora_name"


def test_one_place_is_left_to_those_that_are_not_pinned() -> None:
    registry = make(max_pinned=1)
    load(registry, "a", pinned=True)
    load(registry, "b")
    with pytest.raises(InvalidRequest, match="Unpin one"):
        registry.pin("b", pinned=True)
    with pytest.raises(InvalidRequest, match="Unpin one"):
        registry.stage("c", "/c", owner="api", pinned=True)
    registry.pin("a", pinned=False)
    registry.pin("b", pinned=True)
    load(registry, "b", pinned=True)  # its own place


def test_what_is_not_there_is_unknown() -> None:
    with pytest.raises(UnknownModel, match="there are: none"):
        make().remove("a")


def test_an_owner_replaces_what_is_its_own() -> None:
    registry = make()
    mine = load(registry, "mine")
    registry.replace_owned("repo", [("x", "/x"), ("y", "/y"), ("mine", "/other")])
    before = served(registry)
    assert set(before) == {"mine", "x", "y"}
    assert before["mine"] == mine

    registry.replace_owned("repo", [("y", "/y"), ("z", "/z")])
    after = served(registry)
    assert set(after) == {"mine", "y", "z"}
    assert (after["mine"], after["y"]) == (mine, before["y"])

    revision = registry.revision
    registry.replace_owned("repo", [("y", "/y"), ("z", "/z")])
    assert registry.revision == revision


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(ConfigError, match=r"lora\.store"):
        make(tmp_path / "store")


NAMES = ("a", "b", "c")
ACTIONS = ("load", "stage", "drop", "remove", "pin", "unpin", "note", "sync", "reopen")
CHANGES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(NAMES)), max_size=40)


@given(changes=CHANGES, limit=st.integers(2, 8))
def test_a_replica_that_applies_changes_has_all_records(
    changes: list[tuple[str, str]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After any number of missed changes and managers; no lora_id is drawn twice."""
    store = tmp_path_factory.mktemp("registry") / "store"
    had = Desired(revision=1)
    known: dict[str, int] = {}  # what is served
    drawn: list[int] = []
    with mock.patch.object(module, "MAX_CHANGES", limit):
        registry = make(store)
        for action, name in [*changes, ("sync", "")]:
            before = registry.desired()
            with suppress(UnknownModel, InvalidRequest):
                match action:
                    case "load" | "stage":
                        staged = registry.stage(name, "/x", owner="api")
                        drawn.append(staged.lora_id)
                        if action == "load":
                            known[name] = registry.commit(staged.lora_id, "").lora_id
                    case "drop":
                        registry.drop(drawn[-1] if drawn else 0)
                    case "remove":
                        known.pop(name, None)
                        registry.remove(name)
                    case "note":
                        registry.note_digest(name, known.get(name, 0), "found")
                    case "sync":
                        had = registry.desired(had.revision).applied_to(had)
                        assert sorted(had.active) == sorted(registry.records)
                        assert had.staged == registry.desired().staged
                    case "reopen":
                        registry.close()
                        registry = make(store)
                    case _:
                        registry.pin(name, pinned=action == "pin")
            assert served(registry) == known
            after = registry.desired()
            assert (after.active, after.staged) == (before.active, before.staged) or (
                after.revision > before.revision
            )
    assert len(drawn) == len(set(drawn))
    registry.close()


def test_a_replica_gets_only_what_changed() -> None:
    registry = make()
    for name in NAMES:
        load(registry, name)
    known = registry.revision
    registry.remove("a")
    registry.pin("b", pinned=True)
    desired = registry.desired(known)
    assert (desired.follows, desired.active) == (known, (registry.find("b"),))
    assert desired.gone == {"a"}
    assert registry.desired().active == registry.records
    assert not registry.desired(registry.revision).active
