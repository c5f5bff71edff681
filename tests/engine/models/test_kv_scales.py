"""Scales of K and V in files and checkpoints: how they are read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.kv_scales import held_scales, read_stored_scales
from remora.engine.weights.formats.stored import declared_kv_dtype
from remora.engine.weights.kv_scale_files import read_scale_file

LAYERS, HEADS = 2, 4
RANKS = {"0": {"0": 0.5, "1": 0.25}, "1": {"0": 2.0, "1": 3.0}}
LIGHT: dict[str, Any] = {"version": "1.0", "quant_type": "per_head", "qmin": -448.0, "qmax": 448.0}


def of_vllm(ranks: Any, dtype: str = "float8_e4m3fn") -> dict[str, Any]:
    return {"model_type": "llama", "kv_cache": {"dtype": dtype, "scaling_factor": ranks}}


def read(folder: Path, content: object, kv_dtype: str = "fp8_e4m3") -> Any:
    file = folder / "scales.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_scale_file(file, kv_dtype=kv_dtype, num_layers=LAYERS, num_kv_heads=HEADS)


def test_scales_of_ranks_become_those_of_their_heads(tmp_path: Path) -> None:
    first, second = (0.5, 0.5, 2.0, 2.0), (0.25, 0.25, 3.0, 3.0)

    assert read(tmp_path, of_vllm(RANKS)) == ((first, first), (second, second))
    assert read(tmp_path, of_vllm({"0": RANKS["1"]}))[1] == ((3.0,) * 4, (3.0,) * 4)


def test_a_calibration_of_lightllm_has_scales_of_k_and_v(tmp_path: Path) -> None:
    per_head = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
    expected = (((1, 2, 3, 4), (5, 6, 7, 8)), ((8, 7, 6, 5), (4, 3, 2, 1)))

    assert read(tmp_path, LIGHT | {"scales": per_head}) == expected
    found = read(tmp_path, LIGHT | {"scales": [[1, 2], [3, 4]]})
    assert found == (((1.0,) * 4, (2.0,) * 4), ((3.0,) * 4, (4.0,) * 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ([], "holds neither kv_cache"),
        (of_vllm(RANKS, "float16"), "has the dtype float16; known are float8_e4m3fn"),
        (of_vllm(RANKS, "int8"), "is for int8, and engine.kv_dtype is fp8_e4m3"),
        (of_vllm({}), "scales of 0 ranks"),
        (of_vllm({str(rank): RANKS["0"] for rank in range(3)}), "scales of 3 ranks"),
        (of_vllm({"1": RANKS["0"]}), "no scaling_factor of ranks 0, 1 and so on"),
        (of_vllm({"0": {"0": 1.0}}), "lacks layer 1 of rank 0, and the model has 2 layers"),
        (of_vllm({"0": {"0": 1.0, "1": 1.0, "2": 1.0}}), "has 3 layers of rank 0"),
        *(
            (
                of_vllm({"0": {"0": 1.0, "1": bad}}),
                "for layer 1 of rank 0; expected 1e-30 to 1e\\+30",
            )
            for bad in (0.0, -1.0, float("nan"), float("inf"), 1e-40, "1.0", None, True)
        ),
        (LIGHT | {"qmax": 240.0, "scales": [[1, 2]] * 2}, "has the qmax 240.0"),
        (LIGHT | {"scales": [[1, 2]]}, "scales of 1 layers, and the model has 2"),
        (LIGHT | {"scales": [[1, 2], [1, 2, 3]]}, "for layer 1 neither 2 scales nor 8"),
        (LIGHT | {"scales": [[1, 2], [1, -2]]}, "the scale -2 for layer 1"),
    ],
    ids=str,
)
def test_files_that_do_not_fit_are_one_error(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.kv_scales_file: .*scales.json .*{message}"):
        read(tmp_path, content)


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scales\.json cannot be read: No such file"):
        read_scale_file(
            tmp_path / "scales.json", kv_dtype="int8", num_layers=LAYERS, num_kv_heads=HEADS
        )


class Tensors:
    """WeightSource of tensors in memory."""

    label = "tiny"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._tensors[name]) for name in names)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (HEADS,), (HEADS, 1, 1)])
@pytest.mark.parametrize("prefix", ["model.layers", "language_model.model.layers"])
def test_scales_are_found_by_all_their_names(
    prefix: str, shape: tuple[int, ...], key: str, value: str
) -> None:
    tensors = {"model.norm.weight": torch.ones(8), f"{prefix}.0.self_attn.q_scale": torch.ones(1)}
    for layer in range(LAYERS):
        tensors[f"{prefix}.{layer}.{key}"] = torch.full(shape, 1.0 + layer)
        tensors[f"{prefix}.{layer}.{value}"] = torch.full(shape, 0.5, dtype=torch.bfloat16)

    found = read_stored_scales(Tensors(tensors), num_layers=LAYERS, num_kv_heads=HEADS)

    assert found == (((1.0,) * 4, (0.5,) * 4), ((2.0,) * 4, (0.5,) * 4))


def test_an_old_scale_is_that_of_k_and_of_v() -> None:
    names = [f"model.layers.{layer}.self_attn.kv_scale" for layer in range(LAYERS)]
    tensors = {name: torch.tensor(0.25) for name in names}

    found = read_stored_scales(Tensors(tensors), num_layers=LAYERS, num_kv_heads=HEADS)

    assert found == (((0.25,) * 4, (0.25,) * 4),) * LAYERS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.self_attn.v_scale": None}, "none of V in layer 1"),
        ({"model.layers.1.self_attn.v_scale": torch.ones(3)}, r"is \[3\]; expected one scale"),
        ({"model.layers.0.self_attn.k_scale": torch.zeros(1)}, "has the scale 0.0"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor([torch.nan])}, "has the scale nan"),
    ],
    ids=str,
)
def test_damaged_checkpoints_are_one_error(
    changes: Mapping[str, Tensor | None], message: str
) -> None:
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in (0, 1) for part in "kv"]
    tensors = {**dict.fromkeys(names, torch.ones(1)), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}

    with pytest.raises(ConfigError, match=message):
        read_stored_scales(Tensors(kept), num_layers=LAYERS, num_kv_heads=HEADS)


@pytest.mark.parametrize(
    ("settings", "kv_dtype"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "symmetric": True}}, "int8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "symmetric": False}}, ""),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, ""),
        ({"kv_cache_scheme": None}, ""),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, ""),
    ],
    ids=str,
)
def test_settings_declare_a_format(settings: dict[str, Any], kv_dtype: str) -> None:
    assert declared_kv_dtype(settings) == kv_dtype


def test_a_rank_holds_the_scales_of_its_layers_and_heads() -> None:
    scales = tuple(
        tuple(tuple(100.0 * layer + 10 * part + head for head in range(HEADS)) for part in (0, 1))
        for layer in range(LAYERS)
    )

    held = held_scales(scales, [1], range(2, 4))  # type: ignore[arg-type]

    assert held is not None
    assert held.dtype == torch.bfloat16
    assert held.tolist() == [[[102.0, 103.0], [112.0, 113.0]]]
    assert held_scales((), [1], range(2)) is None
