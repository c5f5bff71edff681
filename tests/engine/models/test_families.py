"""Every dense family against transformers, in float32, as a user would load it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError
from remora.configs.planning.device_plan import DevicePlan
from remora.engine.graphs.coverage import not_covered
from remora.engine.models.checkpoint import read_config
from remora.engine.runner.device import make_attention
from tests.engine.fakes import make_plan
from tests.engine.loaded import load
from tests.engine.models.families import CASES, make_family
from tests.engine.models.logits import assert_logits, assert_same, make_ids
from tests.engine.models.oracle import Oracle
from tests.engine.models.paged_model import PagedModel

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Let tiny products be computed by one thread: several wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    return make_family(tmp_path_factory.mktemp("family"), request.param)


def test_logits_equal_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    path, oracle = checkpoint

    assert_logits(load(path), Oracle(oracle))


def test_native_kernels_cover_every_family(checkpoint: tuple[Path, Any]) -> None:
    assert not_covered(read_config(checkpoint[0])) == []


def test_half_precision_stays_near_float32(checkpoint: tuple[Path, Any]) -> None:
    path, oracle = checkpoint
    ids = make_ids(40)
    exact = Oracle(oracle).logits(ids)

    logits = PagedModel(load(path, torch.bfloat16)).step(a=ids)["a"]

    assert logits.dtype == torch.float32
    # bfloat16 has 8 bits: errors of some per cent of a logit's spread over three layers.
    assert (logits - exact).abs().mean() < 0.12 * exact.std()


def test_longrope_past_the_original_length_is_what_decoding_token_by_token_gives(
    tmp_path: Path,
) -> None:
    settings = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}
    path, oracle = make_family(tmp_path, "phi3", sliding_window=None, **settings)
    ids = make_ids(50)

    logits = PagedModel(load(path)).step(a=ids)["a"]

    # Phi-3's own generate starts anew past the original length; a step of it does not.
    assert_same(logits, Oracle(oracle, stepwise=True).logits(ids))


def test_a_fused_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    path, _ = make_family(tmp_path, "phi3")
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, file)

    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.qkv_proj.* cannot be divided"):
        load(path)


def test_triton_refuses_alibi_and_says_what_to_do(tmp_path: Path) -> None:
    model = load(make_family(tmp_path, "falcon-1b-alibi")[0])
    plan = make_plan(device="cuda", on_device=DevicePlan(attention_backend="triton"))

    with pytest.raises(ConfigError, match=r"= triton: it does not support ALiBi; set it to torch"):
        make_attention(model, plan, 4)
