"""Every kernel alone, for shapes of models, beside what torch has for the same.

A kernel's share is the time that its bytes or its products would take at the speeds of the device,
whichever is longer, of what it took. What lies in a cache, or multiplies in 8 bits, may have a
share above 1; what is small is all launch. Without a GPU each kernel is called once, and not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from tests.benchmarks.gpu import shapes
from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.cases import attention, lora, products, rows
from tests.benchmarks.gpu.interpreted import interpret_on_cpu
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.timing import KernelCase, replayed_s

MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": shapes.LLAMA_8B,
    "qwen3-0.6b": shapes.QWEN3_06B,
    "qwen3-30b-a3b": shapes.QWEN3_30B,
}
CASE_S = 40.0  # compiling included


def cases(setting: Setting) -> Iterator[Case]:
    if setting.is_tiny:
        interpret_on_cpu()
    for case in FAMILIES[setting.options["family"]](tiny=setting.is_tiny):
        about = Row(model=case.model, what=f"{case.kernel} {case.shape}")
        yield Case(about, partial(measure, case, about, setting), CASE_S)


def measure(case: KernelCase, about: Row, setting: Setting) -> Iterator[Row]:
    """Time a kernel, and its peers on the same inputs."""
    if setting.is_tiny:
        case.make(setting.torch_device, setting.dtype).run()
        yield about
        return
    calls = case.calls(setting.torch_device, setting.dtype)
    seconds = replayed_s([call.run for call in calls])
    row = about.timed(seconds, setting.bounds, moved=case.num_bytes, flops=case.flops)
    yield row
    for name in calls[0].peers:
        peer = replace(about, what=f"{about.what} / {name}")
        try:
            peer_s = replayed_s([call.peers[name] for call in calls])
        except Exception as error:  # of another's: no failure of ours
            yield replace(peer, details={"failed": f"{type(error).__name__}: {error}"[:300]})
            continue
        yield peer.found(peer_s / seconds, "times", details={"peer_us": peer_s * 1e6})


def all_cases(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield all but quantised products and adapters, by how much a model needs them."""
    models = {"tiny": shapes.TINY_MOE} if tiny else MODELS
    for name, config in models.items():
        yield from attention.cases(name, config, tiny=tiny)
        if tiny or name == "llama-3.1-8b":
            yield from products.plain_cases(name, config, tiny=tiny)
        if "num_experts" in config:
            yield from products.expert_cases(name, config, tiny=tiny)
        yield from rows.cases(name, config, tiny=tiny)


def quantised_cases(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield products and experts with quantised weights."""
    dense, sparse = (shapes.TINY, shapes.TINY_MOE) if tiny else (shapes.LLAMA_8B, shapes.QWEN3_30B)
    yield from products.quantised_cases("tiny" if tiny else "llama-3.1-8b", dense, tiny=tiny)
    if not tiny:  # fp8 experts of full blocks only
        yield from products.fp8_expert_cases("qwen3-30b-a3b", sparse)


def checked_cases(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield everything that is compared."""
    yield from chain(all_cases(tiny=tiny), quantised_cases(tiny=tiny), lora.cases(tiny=tiny))


FAMILIES = {"all": all_cases, "quantised": quantised_cases, "lora": lora.cases}
