"""Errors of the manager cross its Serve handle as values: Serve logs a traceback of raised ones."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from remora.configs.errors import AdapterNotFound, InvalidRequest, RemoraError, Unavailable
from remora.deployments.adapters.manager import LoRAManager
from remora.deployments.adapters.manager_handle import HandledManager


class Manager:
    """A manager whose methods raise."""

    call = LoRAManager.call

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.escaped: list[BaseException] = []

    async def load(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        return args, kwargs

    def options(self, *, method_name: str) -> Any:
        """Be a handle: results and errors are pickled, and raised errors noted."""

        async def remote(*args: Any, **kwargs: Any) -> Any:
            try:
                return pickle.loads(pickle.dumps(await getattr(self, method_name)(*args, **kwargs)))
            except BaseException as error:
                self.escaped.append(error)
                raise

        return SimpleNamespace(remote=remote)


def handled(manager: Manager) -> HandledManager:
    return HandledManager(manager)


@pytest.mark.parametrize(
    "error",
    [
        AdapterNotFound("/a is not there"),
        InvalidRequest("x", "lora_name", "c"),
        Unavailable("w", 7),
    ],
)
async def test_a_refusal_is_raised_at_the_caller_only(error: RemoraError) -> None:
    manager = Manager(error)

    with pytest.raises(type(error)) as caught:
        await handled(manager).load("a", "/a")

    assert type(caught.value) is type(error)
    assert vars(caught.value) == vars(error)
    assert manager.escaped == []


@pytest.mark.parametrize("error", [ZeroDivisionError(), RayActorError()])
async def test_other_errors_are_raised_through_the_handle(error: Exception) -> None:
    manager = Manager(error)

    with pytest.raises(Exception):  # noqa: B017, PT011
        await handled(manager).load("a", "/a")

    assert [type(each) for each in manager.escaped] == [type(error)]


async def test_results_pass() -> None:
    found = await handled(Manager(None)).load("a", "/a", pinned=True)
    assert found == (("a", "/a"), {"pinned": True})
