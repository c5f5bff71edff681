"""Every dense family against transformers, in float32, as a user would load it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.planning.device_plan import DevicePlan
from remora.engine.graphs.coverage import not_covered
from remora.engine.models.checkpoint import read_config
from remora.engine.models.load import load_model
from remora.engine.runner.device import make_attention
from tests.engine.fakes import make_plan
from tests.engine.models.families import CASES, make_family
from tests.engine.models.paged_model import PagedModel
from tests.tiny_models import VOCAB_SIZE

TOLERANCE = 2e-4
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
    "original_max_position_embeddings": 32,
}
NUM_TOKENS = 60  # more than two windows and three pages


def make_ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


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


def load(path: Path, dtype: torch.dtype = torch.float32) -> PagedModel:
    model = load_model(path, dtype=dtype, load_format="auto", device="cpu", show_progress=False)
    return PagedModel(model)


@torch.inference_mode()
def oracle_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def assert_same(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_logits_and_greedy_tokens_equal_those_of_transformers(
    checkpoint: tuple[Path, Any],
) -> None:
    path, oracle = checkpoint
    paged, ids, other = load(path), make_ids(NUM_TOKENS), make_ids(30, seed=1)
    expected = oracle_logits(oracle, ids)
    assert expected.std() > 0.01

    whole = paged.step(whole=ids)["whole"]
    chunks = [ids[0:7], ids[7:8], ids[8:40], ids[40:59]]
    parts = [paged.step(parts=chunk)["parts"] for chunk in chunks]
    mixed = paged.step(parts=ids[59:], other=other)
    paged.step(one=ids[:20])
    one_by_one = [paged.step(one=[token])["one"] for token in ids[20:]]

    assert_same(whole, expected)
    assert_same(torch.cat([*parts, mixed["parts"]]), expected)
    assert_same(mixed["other"], oracle_logits(oracle, other))
    assert_same(torch.cat(one_by_one), expected[20:])
    token, made = int(expected[-1].argmax()), list(ids)
    for _ in range(4):
        made.append(token)
        token = int(paged.step(whole=[token], one=[token])["whole"][0].argmax())
        assert token == int(oracle_logits(oracle, made)[-1].argmax())


def test_half_precision_stays_near_float32(checkpoint: tuple[Path, Any]) -> None:
    path, oracle = checkpoint
    ids = make_ids(40)
    exact = oracle_logits(oracle, ids)

    logits = load(path, torch.bfloat16).step(a=ids)["a"]

    assert logits.dtype == torch.float32
    # bfloat16 has 8 bits: errors of some per cent of a logit's spread over three layers.
    assert (logits - exact).abs().mean() < 0.08 * exact.std()


def test_longrope_past_the_original_length_is_what_decoding_token_by_token_gives(
    tmp_path: Path,
) -> None:
    settings = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}
    path, oracle = make_family(tmp_path, "phi3", sliding_window=None, **settings)
    ids, cache, steps = make_ids(50), None, []
    with torch.inference_mode():
        for token in ids:
            # Phi-3's own generate starts anew past the original length; a step of it does not.
            out = oracle(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[0])

    logits = load(path).step(a=ids)["a"]

    assert_same(logits, torch.cat(steps))


def test_a_fused_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    path, _ = make_family(tmp_path, "phi3")
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, file)

    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.qkv_proj.* cannot be divided"):
        load(path)


@pytest.mark.parametrize(
    ("family", "gap"),
    [
        ("falcon-1b-alibi", None),
        ("granite", None),
        ("gemma2", None),
        ("gpt-neox", None),
    ],
)
def test_what_native_kernels_lack_of_a_family_is_said(
    family: str, gap: str | None, tmp_path: Path
) -> None:
    config = read_config(make_family(tmp_path, family)[0])

    gaps = ", ".join(not_covered(config))

    assert gap in gaps if gap else gaps == ""


def test_triton_refuses_alibi_and_says_what_to_do(tmp_path: Path) -> None:
    model = load(make_family(tmp_path, "falcon-1b-alibi")[0]).model
    plan = make_plan(on_device=DevicePlan(attention_backend="triton"))

    with pytest.raises(ConfigError, match=r"ALiBi.* set engine\.attention_backend to torch"):
        make_attention(model, plan, 4)
