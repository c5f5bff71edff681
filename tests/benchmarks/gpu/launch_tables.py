"""Entries of launch tables, how to replace one for a while, and what else to try in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from remora.kernels.gpu.arch import Arch
from tests.benchmarks.gpu.timing import KernelCase


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a launch table, with a case that uses it.

    table:   the module's attribute
    key:     of the entry: a size, or the rows of a tile
    tried:   values of fields, of which all combinations are tried
    """

    module: Any
    table: str
    key: int
    case: KernelCase
    tried: Mapping[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        """The module, the table and the key."""
        return (
            f"{self.module.__name__.removeprefix('remora.kernels.gpu.')}.{self.table}[{self.key}]"
        )

    def launch(self, arch: Arch) -> Any:
        """Return what the table holds."""
        found = getattr(self.module, self.table)
        of_arch = found.get(arch, found)
        if isinstance(of_arch, tuple):
            return next(each for each in of_arch if each.rows == self.key)
        return of_arch[self.key]

    def others(self, arch: Arch) -> Iterator[Any]:
        """Yield what to try, the most alike first."""
        launch = self.launch(arch)
        names = [field.name for field in fields(launch)]
        choices = [
            dict(zip(self.tried, each, strict=True)) for each in product(*self.tried.values())
        ]
        now = asdict(launch)
        assert set(self.tried) <= set(names)
        choices.sort(key=lambda choice: sum(now[name] != value for name, value in choice.items()))
        for choice in choices:
            other = replace(launch, **choice)
            if other != launch:
                yield other

    @contextmanager
    def replaced(self, arch: Arch, launch: Any) -> Iterator[None]:
        """Let the table hold another launch within the block."""
        before = getattr(self.module, self.table)
        setattr(self.module, self.table, self._with(before, arch, launch))
        try:
            yield
        finally:
            setattr(self.module, self.table, before)

    def _with(self, table: Any, arch: Arch, launch: Any) -> Any:
        if arch not in table:
            return {**table, self.key: launch}
        of_arch = table[arch]
        if isinstance(of_arch, tuple):
            changed: Any = tuple(launch if each.rows == self.key else each for each in of_arch)
        else:
            changed = {**of_arch, self.key: launch}
        return {**table, arch: changed}


def entries(*, tiny: bool) -> Iterator[Entry]:
    """Yield what serving uses most first."""
    from remora.kernels.gpu import linear_groups, linear_quant, lora, moe
    from remora.kernels.gpu.attention import decode, prefill
    from remora.kernels.row_tiles import SMALL_TILE
    from tests.benchmarks.gpu import shapes
    from tests.benchmarks.gpu.cases import attention, products
    from tests.benchmarks.gpu.cases import lora as lora_cases

    heads = attention.Heads(2, 1, 64) if tiny else attention.Heads(32, 8, 128)
    size = heads.dim
    dense, sparse = (shapes.TINY, shapes.TINY_MOE) if tiny else (shapes.LLAMA_8B, shapes.QWEN3_30B)
    make: Callable[..., KernelCase] = attention.decode
    yield Entry(
        decode,
        "LAUNCHES",
        size,
        make("llama-3.1-8b", heads, *((2, 20) if tiny else (64, 1024))),
        {
            "keys": (32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (3, 4, 5),
            "programs": (132 * 2, 132 * 3, 132 * 4),
        },
    )
    prompt = 18 if tiny else 4096
    yield Entry(
        prefill,
        "LAUNCHES",
        size,
        attention.extend("llama-3.1-8b", heads, "prompt", [(prompt, prompt)]),
        {"queries": (64, 128), "keys": (32, 64, 128), "num_warps": (4, 8), "num_stages": (3, 4, 5)},
    )
    tiles = {
        "columns": (32, 64, 128),
        "inputs": (64, 128),
        "num_warps": (4, 8),
        "num_stages": (3, 4, 5),
    }
    for rows, key in ((3, 16),) if tiny else ((8, 16), (256, 32), (4096, 128)):
        case = products.experts("qwen3-30b-a3b", sparse, rows)
        yield Entry(moe, "LAUNCHES", key, case, tiles)
    name, outputs, inputs = products.layers(dense, tiny=tiny)[0]
    for rows, key in ((3, 16),) if tiny else ((8, 16), (64, 64), (4096, 128)):
        for kind, module in (("fp8", linear_quant), ("int4 128", linear_groups)):
            case = products.product(
                "llama-3.1-8b", f"linear_quant {kind}", name, rows, outputs, inputs
            )
            if any(each.rows == key for each in module.LAUNCHES[Arch.HOPPER]):
                yield Entry(module, "LAUNCHES", key, case, {**tiles, "inputs": (128, 256)})
    layer, step = (
        (lora_cases.SMALL[0], lora_cases.SMALL_STEPS[0])
        if tiny
        else (lora_cases.LAYERS[0], lora_cases.STEPS[1])
    )
    yield Entry(
        lora,
        "LAUNCHES",
        SMALL_TILE,
        lora_cases.case("lora", layer, *step),
        {"inputs": (64, 128), "columns": (64, 128), "max_splits": (4, 8, 16), "num_stages": (3, 4)},
    )
