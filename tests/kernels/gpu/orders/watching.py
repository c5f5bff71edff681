"""Runs interpreted programs in another order, and watches the memory that they touch.

A GPU runs the programs of a launch in any order and at the same time. A launch is safe if it only
touches memory of its arguments, no two programs write one address, and none reads what another
writes. The addresses are those of elements, so writes of one address in two widths are not noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Program = tuple[int, int, int]
Order = Callable[[Sequence[Program]], Sequence[Program]]
Addresses = npt.NDArray[np.uint64]


def forwards(programs: Sequence[Program]) -> Sequence[Program]:
    return programs


def backwards(programs: Sequence[Program]) -> Sequence[Program]:
    return programs[::-1]


def shuffled(programs: Sequence[Program]) -> Sequence[Program]:
    places = np.random.default_rng(len(programs)).permutation(len(programs))
    return [programs[place] for place in places]


class Touched:
    """Addresses of loads or of stores, each with the program that made it."""

    def __init__(self) -> None:
        self._parts: list[Addresses] = []
        self._programs: list[int] = []

    def add(self, addresses: Addresses, program: int) -> None:
        self._parts.append(addresses)
        self._programs.append(program)

    def owners(self) -> tuple[Addresses, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return distinct addresses, ascending, and each one's first and last program."""
        sizes = [len(part) for part in self._parts]
        programs = np.repeat(np.array(self._programs, np.int64), sizes)
        addresses = np.concatenate([*self._parts, np.empty(0, np.uint64)])
        order = np.argsort(addresses, kind="stable")
        distinct, first = np.unique(addresses[order], return_index=True)
        if len(distinct) == 0:
            return distinct, programs, programs
        of_address = programs[order]
        return (
            distinct,
            np.minimum.reduceat(of_address, first),
            np.maximum.reduceat(of_address, first),
        )


class Launch:
    """Memory of one launch's arguments, and what its programs touch."""

    def __init__(self, kernel: str, arguments: Sequence[Any]) -> None:
        self._kernel = kernel
        self.program = 0
        self.loads, self.stores = Touched(), Touched()
        storages = {
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for storage in (
                each.untyped_storage() for each in arguments if hasattr(each, "untyped_storage")
            )
        }
        self._begins, self._ends = np.array(sorted(storages), np.uint64).reshape(-1, 2).T

    def note(self, touched: Touched, pointers: Any, mask: Any) -> None:
        """Note the addresses of a load or store. Raises AssertionError for any of no argument."""
        is_used = np.broadcast_to(mask.data, pointers.data.shape)
        addresses = np.unique(pointers.data[is_used])
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        place = np.searchsorted(self._begins, addresses, side="right") - 1
        is_inside = (place >= 0) & (addresses + np.uint64(width) <= self._ends[place])
        assert is_inside.all(), (
            f"{self._kernel}: program {self.program} touches memory of no argument"
        )
        touched.add(addresses, self.program)

    def check(self) -> None:
        """Raise AssertionError if the result may depend on the order of programs."""
        written, first, last = self.stores.owners()
        twice = int((first != last).sum())
        assert twice == 0, f"{self._kernel}: {twice} addresses are written by two programs"
        read, first_reader, last_reader = self.loads.owners()
        _, of_written, of_read = np.intersect1d(written, read, return_indices=True)
        is_other = (first_reader[of_read] != first[of_written]) | (
            last_reader[of_read] != first[of_written]
        )
        others = int(is_other.sum())
        assert others == 0, f"{self._kernel}: {others} addresses are read by another program"


@contextmanager
def watched(order: Order = forwards) -> Iterator[list[str]]:
    """Run programs of launches within in this order, and check each launch.

    order:  may leave programs out
    Yields the names of the kernels that were launched.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    run = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    kernels: list[str] = []
    launch: Launch | None = None
    programs: Sequence[Program] = ()

    def call(executor: Any, *args: Any, **options: Any) -> None:
        nonlocal launch, programs
        dims = (*executor.grid, 1, 1)[:3]
        xs, ys, zs = map(range, dims)
        programs = order(list(itertools.product(xs, ys, zs)))
        executor.grid = (len(programs),)
        patch.setattr(
            InterpreterBuilder, "set_grid_dim", lambda builder, *_: set_dims(builder, dims)
        )
        kernels.append(executor.fn.__name__)
        launch = Launch(executor.fn.__name__, [*args, *options.values()])
        run(executor, *args, **options)
        launch.check()
        launch = None

    def set_dims(builder: Any, dims: Program) -> None:
        builder.grid_dim = dims

    def set_program(builder: Any, place: int, *_: int) -> None:
        assert launch is not None
        launch.program = place
        builder.grid_idx = programs[place]

    def masked_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        assert launch is not None
        launch.note(launch.loads, pointers, mask)
        return load(builder, pointers, mask, *rest)

    def masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        assert launch is not None
        launch.note(launch.stores, pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", call)
        patch.setattr(InterpreterBuilder, "set_grid_idx", set_program)
        patch.setattr(InterpreterBuilder, "create_masked_load", masked_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", masked_store)
        yield kernels
