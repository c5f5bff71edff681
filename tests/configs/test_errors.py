from __future__ import annotations

import pickle

import pytest

from remora.configs import errors
from remora.configs.errors import CapacityError, RemoraError, RequestError

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, RemoraError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_the_way_between_processes(kind: type[RemoraError]) -> None:
    original = kind("what happened")

    copy = pickle.loads(pickle.dumps(original))

    assert type(copy) is kind
    assert str(copy) == "what happened"
    assert copy.__dict__ == original.__dict__
    if issubclass(kind, RequestError):
        request = pickle.loads(pickle.dumps(kind("no", "top_p", "some_code")))
        assert (request.message, request.param, request.code) == ("no", "top_p", "some_code")
    if issubclass(kind, CapacityError):
        assert pickle.loads(pickle.dumps(kind("busy", 7.5))).retry_after_s == 7.5


def test_the_tree_drawn_in_the_module_names_every_class() -> None:
    drawn = {line.split()[0] for line in (errors.__doc__ or "").splitlines() if line.strip()}

    assert {kind.__name__ for kind in CLASSES} <= drawn
