"""Which forward pass a configuration gets, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.machine import read_machine_facts
from remora.configs.planning.rounding import ROUNDINGS, Rounding, plan_rounding
from remora.configs.sections.model import ModelSection
from remora.engine.graphs.step_program import StepProgram
from remora.engine.launch import BuiltEngine, build_engine, make_table
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import load_model
from remora.engine.runner.eager import EagerForward
from remora.engine.runner.forward import DTYPES, BuiltForward, build_forward
from remora.engine.types import Request, SamplingParams
from remora.kernels.cpu.build import NativeUnavailable, load_library
from tests.conftest import TinyCheckpoints


@pytest.fixture
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture
def compiler() -> None:
    """Skip where native kernels cannot be had."""
    try:
        load_library(cache_dir() / "kernels")
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def build_whole(
    path: Path,
    *,
    quantization: str = "none",
    quantization_overrides: Sequence[Any] = (),
    dtype: str = "float32",
    **engine: Any,
) -> BuiltEngine:
    """Build an engine, and close it."""
    sections = {
        "model": {
            "path": str(path),
            "dtype": dtype,
            "quantization": quantization,
            "quantization_overrides": [*quantization_overrides],
        },
        "engine": {"kv_tokens": 256, "num_threads": 1, "device": "cpu", **engine},
    }
    built = build_engine(parse_args(sections), show_progress=False)
    built.engine.close()
    return built


def describe(path: Path, **options: Any) -> str:
    """Return what a configuration computes with, in words; `options` as of `build_whole`."""
    return build_whole(path, **options).kernels


def build(path: Path, *, kernels: str = "auto", **model: Any) -> BuiltForward:
    plan = build_whole(path, dtype="bfloat16", cpu_kernels=kernels, **model).plan
    loaded = load_model(
        path, dtype=DTYPES["bfloat16"], load_format="auto", device="cpu", show_progress=False
    )
    return build_forward(loaded, plan, make_table(plan), cache_dir() / "kernels")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kernels", ["auto", "native"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_cpu_runs_native_step_programs(
    llama: Path, quantization: str, dtype: str, kernels: str
) -> None:
    description = describe(llama, quantization=quantization, dtype=dtype, cpu_kernels=kernels)

    assert description.startswith("native step program (")


class _Places(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes on which kinds of devices operations make tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        self.kinds |= {t.device.type for t in tree_leaves(made) if isinstance(t, torch.Tensor)}
        return made


@pytest.mark.observes("engine.device")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_compute_on_the_device(llama: Path, device: str) -> None:
    engine = {"device": device, "attention_backend": "torch", "cpu_kernels": "torch"}
    sections = {
        "model": {"path": str(llama)},
        "engine": {"kv_tokens": 256, "num_threads": 1, **engine},
    }
    if device == "cuda" and not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"engine\.device = cuda: this machine has cpu"):
            build_engine(parse_args(sections), show_progress=False)
        return
    built = build_engine(parse_args(sections), show_progress=False).engine
    built.add(Request(request_id="a", prompt_ids=[11], sampling=SamplingParams(max_tokens=1)))
    with _Places() as places:
        while built.has_work:
            built.step()
    built.close()

    assert device in places.kinds
    assert ("cuda" in places.kinds) == (device == "cuda")


UNCOVERED = [
    ({"page_size": 8}, "engine.page_size is 8"),
]


@pytest.mark.parametrize(("options", "reason"), UNCOVERED)
def test_what_native_kernels_do_not_cover_runs_in_torch_or_is_refused(
    llama: Path, options: dict[str, Any], reason: str
) -> None:
    description = describe(llama, **options)

    assert description.startswith("torch, which is slower, because ")
    assert reason in description
    with pytest.raises(ConfigError, match=reason):
        describe(llama, cpu_kernels="native", **options)


@pytest.mark.usefixtures("compiler")
def test_more_heads_per_kv_head_than_a_block_holds_run_natively(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints(
        "llama", num_attention_heads=193, num_key_value_heads=1, head_dim=2, hidden_size=193
    )

    assert describe(path).startswith("native")


@pytest.mark.observes("engine.cpu_kernels")
def test_torch_is_used_where_it_is_asked_for(llama: Path) -> None:
    assert describe(llama, cpu_kernels="torch") == "torch (as engine.cpu_kernels says)"


@pytest.mark.observes("engine.num_threads")
def test_a_rank_computes_in_as_many_threads_as_is_written(llama: Path) -> None:
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            built = build_whole(llama, num_threads=num_threads, cpu_kernels="torch")
            assert built.torch_threads == torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_computes_unless_native_kernels_are_required(llama: Path) -> None:
    description = describe(llama)

    assert description.startswith("torch, which is slower, because no C++ compiler was found")
    assert "CXX = no-such-compiler" in description
    with pytest.raises(ConfigError, match=r"engine.cpu_kernels is native, but no C\+\+ compiler"):
        describe(llama, cpu_kernels="native")


def test_a_path_without_compilers_is_no_compiler(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert "no C++ compiler was found" in describe(llama)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [*UNCOVERED, ({"cpu_kernels": "torch"}, "engine.cpu_kernels is torch")],
)
def test_quantised_weights_without_native_kernels_are_refused(
    llama: Path, options: dict[str, Any], reason: str, quantization: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"model.quantization = {quantization} needs the native"
    ) as e:
        describe(llama, quantization=quantization, **options)

    assert reason in str(e.value)
    assert "leave the key out" in str(e.value)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_quantised_weights_without_a_compiler_are_refused(llama: Path, kernels: str) -> None:
    with pytest.raises(ConfigError, match=r"int4 needs the native CPU kernels: no C\+\+ compiler"):
        describe(llama, quantization="int4", cpu_kernels=kernels)


OVERRIDES = [
    {"parts": ["o_proj", "down_proj"], "format": "int8"},
    {"parts": ["gate_proj", "up_proj"], "layers": [1], "format": "int4"},
    {"parts": ["v_proj"], "layers": [0], "format": "none"},
    {"parts": ["down_proj"], "layers": [0], "format": "int5"},
]


@pytest.mark.usefixtures("compiler")
@pytest.mark.observes("model.quantization_overrides")
@pytest.mark.parametrize("overrides", [[], OVERRIDES], ids=["usual", "overrides"])
@pytest.mark.parametrize("quantization", ["none", *ROUNDINGS])
def test_weights_take_the_bits_that_the_plan_names(
    quantization: str, overrides: list[dict[str, Any]], tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints(
        "llama",
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    )
    facts = read_model_facts(path)
    section = ModelSection.model_validate(
        {
            "path": str(path),
            "quantization": quantization,
            "quantization_overrides": overrides,
        }
    )
    features = read_machine_facts().cpu_features
    rounding = plan_rounding(section, facts, "cpu", features) or Rounding(usual="none", head="none")
    numbers = facts.linear_weights
    head = rounding.bits_of(rounding.head) * 128 * (-(-facts.vocab_size // 64) * 64)

    built = build(path, quantization=quantization, quantization_overrides=overrides)

    expected = sum(
        rounding.bits_of(rounding.format_of(part, layer)) * count / facts.num_layers
        for part, count in numbers.items()
        for layer in range(facts.num_layers)
    )
    assert built.step_weight_bytes * 8 == pytest.approx(expected + head, rel=0.01)


@pytest.mark.usefixtures("compiler")
def test_quantised_weights_are_fewer_bytes_a_step(llama: Path) -> None:
    plain, int8, int4 = (build(llama, quantization=q) for q in ("none", "int8", "int4"))

    assert isinstance(plain.forward, StepProgram)
    assert int4.step_weight_bytes < int8.step_weight_bytes < plain.step_weight_bytes
    assert plain.torch_threads == 1


def test_torch_reads_the_weights_without_the_table_that_it_looks_up(llama: Path) -> None:
    built = build(llama, kernels="torch")

    assert isinstance(built.forward, EagerForward)
    layer = 96 * (6 + 2 + 2) * 16 + 96 * 96 + 3 * 96 * 128 + 2 * 96
    assert built.step_weight_bytes == 2 * (3 * layer + 96 + 512 * 96)
