"""What 8-bit K and V save, and who has none."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.kv_format import kv_gain, pick_kv_dtype
from remora.configs.planning.memory_report import lines, report
from remora.configs.sections.engine import KV_8_BIT
from tests.configs.planning.test_plan import GIB, make_model, plan, refusal
from tests.configs.test_banner import make_banner

EVERY_FORMAT = pytest.mark.parametrize("kv_dtype", KV_8_BIT)


@EVERY_FORMAT
@pytest.mark.parametrize(("head_dim", "gain"), [(64, 1.88), (128, 1.94), (256, 1.97)])
def test_the_same_memory_holds_almost_twice_the_tokens(
    kv_dtype: str, head_dim: int, gain: float
) -> None:
    model = make_model(head_dim=head_dim)
    wide, narrow = (
        plan(facts=model, engine={"kv_memory": 4 * GIB, "kv_dtype": each})
        for each in ("auto", kv_dtype)
    )

    assert gain <= narrow.kv_tokens / wide.kv_tokens < 2
    assert narrow.kv_tokens / wide.kv_tokens == pytest.approx(
        kv_gain(model, "bfloat16", kv_dtype), rel=1e-3
    )


def test_the_format_of_the_model_is_no_change() -> None:
    made = plan(engine={"kv_dtype": "bfloat16", "kv_tokens": 1600})

    assert made == plan(engine={"kv_tokens": 1600})
    assert made.cached_dtype == "bfloat16"


def test_report_and_banner_name_format_and_gain() -> None:
    model, engine = make_model(), {"kv_dtype": "int8", "kv_tokens": 1600}
    made = plan(facts=model, engine=engine)

    assert "11.6 KiB in int8, 1.94 x the tokens of bfloat16" in "\n".join(
        lines(report(made, model, is_native=True), made)
    )
    assert "in int8 (1.94 x the tokens of bfloat16)" in make_banner(engine)
    assert "x the tokens" not in make_banner({"kv_tokens": 1600})


@pytest.mark.parametrize(
    ("facts", "sections", "reason"),
    [
        ({"kv_vectors": 1}, {"engine": {"kv_dtype": "int8"}}, "latents"),
        ({}, {"engine": {"kv_dtype": "float16"}}, "the model computes in bfloat16"),
        (
            {},
            {"engine": {"kv_dtype": "fp8_e4m3", "compile": True, "cpu_kernels": "torch"}},
            "leave engine.compile out",
        ),
    ],
)
def test_what_has_no_such_cache_says_why(
    facts: dict[str, Any], sections: dict[str, Any], reason: str
) -> None:
    message = refusal(facts=make_model(**facts), **sections)

    assert message.startswith(f"engine.kv_dtype = {sections['engine']['kv_dtype']}: ")
    assert reason in message


def test_libraries_read_no_such_scales() -> None:
    config = parse_args({"model": {"path": "tiny"}, "engine": {"kv_dtype": "int8"}})

    with pytest.raises(ConfigError, match=r"flashinfer reads no scales .* set that to triton"):
        pick_kv_dtype(config, make_model(), "bfloat16", DevicePlan(attention_backend="flashinfer"))


def test_auto_is_what_the_checkpoint_declares_where_it_is_supported() -> None:
    config = parse_args({"model": {"path": "tiny"}})
    declares, compiled = make_model(kv_dtype="fp8_e4m3"), DevicePlan(compiled_rows=4)

    assert pick_kv_dtype(config, declares, "bfloat16", DevicePlan()) == "fp8_e4m3"
    assert pick_kv_dtype(config, declares, "bfloat16", compiled) == "auto"
    plain = parse_args({"model": {"path": "tiny"}, "engine": {"kv_dtype": "bfloat16"}})
    assert pick_kv_dtype(plain, declares, "bfloat16", DevicePlan()) == "auto"


@pytest.mark.parametrize("pp_size", [1, 2])
def test_skipped_layers_take_the_bytes_of_the_model_s_format(pp_size: int) -> None:
    model, skipped = make_model(num_layers=4, head_dim=64), [0, 3]
    parallel = {"pp_size": pp_size}

    def tokens(**engine: Any) -> int:
        made = plan(facts=model, engine={"kv_memory": 4 * GIB, **engine}, parallel=parallel)
        assert made.kv_bytes <= 4 * GIB
        return made.kv_tokens

    wide, narrow = tokens(), tokens(kv_dtype="int8")
    mixed = tokens(kv_dtype="int8", kv_dtype_skip_layers=skipped)
    assert mixed / wide == pytest.approx(2 / (1 + narrow**-1 * wide), rel=1e-3)
    assert mixed / wide == pytest.approx(kv_gain(model, "bfloat16", "int8", skipped), rel=1e-3)
    assert tokens(kv_dtype="int8", kv_dtype_skip_layers=[0, 1, 2, 3]) == wide


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kv_dtype_skip_layers": [1]}, "K and V are cached in the model's format"),
        ({"kv_scales_file": "s.json"}, "K and V are cached in the model's format"),
        ({"kv_dtype": "int8", "kv_dtype_skip_layers": [2, 99]}, "no layer 99; its 30 layers"),
    ],
    ids=str,
)
def test_keys_that_need_8_bits_or_more_layers_are_refused(
    engine: dict[str, Any], message: str
) -> None:
    assert message in refusal(engine=engine)


def test_e4m3_is_refused_where_triton_cannot_convert_it() -> None:
    config = parse_args({"model": {"path": "tiny"}, "engine": {"kv_dtype": "fp8_e4m3"}})
    triton, torch = (DevicePlan(attention_backend=name) for name in ("triton", "torch"))

    with pytest.raises(ConfigError, match=r"fp8_e4m3: Triton .* set it to int8 or fp8_e5m2"):
        pick_kv_dtype(config, make_model(), "bfloat16", triton, converts_e4m3=False)
    assert pick_kv_dtype(config, make_model(), "bfloat16", torch, converts_e4m3=False) == "fp8_e4m3"
    assert pick_kv_dtype(config, make_model(), "bfloat16", triton) == "fp8_e4m3"
