"""Baichuan 13B against its formulas, written out here: transformers has no class of it."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from remora.engine.models.families.fused import BAICHUAN2_VOCABULARY
from tests.engine.loaded import load
from tests.engine.models.paged_model import PagedModel

SIZE, INNER, HEADS, LAYERS, EPS = 48, 80, 6, 2, 1e-6  # 6 heads: not a power of 2, as 40
IDS = [(7 * at + 3) % 500 for at in range(40)]
Tensors = dict[str, Tensor]


def make_tensors(vocab_size: int) -> Tensors:
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weight(vocab_size, SIZE),
        "model.norm.weight": 1 + weight(SIZE),
        "lm_head.weight": weight(vocab_size, SIZE),
    }
    for layer in range(LAYERS):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": made
            for name, made in {
                "self_attn.W_pack": weight(3 * SIZE, SIZE),
                "self_attn.o_proj": weight(SIZE, SIZE),
                "mlp.gate_proj": weight(INNER, SIZE),
                "mlp.up_proj": weight(INNER, SIZE),
                "mlp.down_proj": weight(SIZE, INNER),
                "input_layernorm": 1 + weight(SIZE),
                "post_attention_layernorm": 1 + weight(SIZE),
            }.items()
        }
    return tensors


def make_checkpoint(folder: Path, vocab_size: int) -> Tensors:
    raw = {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
        "vocab_size": vocab_size,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "model_max_length": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = make_tensors(vocab_size)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def slopes_of(num_heads: int) -> list[float]:
    """As ALiBi's authors give them (arXiv:2108.12409): a geometric series; between two powers of 2
    every second one of the next series fills up."""
    series = 2 ** math.floor(math.log2(num_heads))
    first = 2 ** (-8 / series)
    slopes = [first**power for power in range(1, series + 1)]
    if series == num_heads:
        return slopes
    return slopes + slopes_of(2 * series)[0::2][: num_heads - series]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def attend(x: Tensor, packed: Tensor) -> Tensor:
    query, key, value = (
        part.view(len(x), HEADS, SIZE // HEADS).transpose(0, 1)
        for part in (x @ packed.T).chunk(3, dim=1)
    )
    at = torch.arange(len(x))
    bias = torch.tensor(slopes_of(HEADS)).view(HEADS, 1, 1) * at  # of keys: larger is nearer
    scores = query @ key.transpose(1, 2) / math.sqrt(SIZE // HEADS) + bias
    shares = scores.masked_fill(at > at.unsqueeze(1), -torch.inf).softmax(-1)
    return (shares @ value).transpose(0, 1).flatten(1)


def logits_of(tensors: Tensors, ids: list[int], *, unit_rows: bool) -> Tensor:
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        own = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
        }
        attended = attend(norm(x, own["input_layernorm"]), own["self_attn.W_pack"])
        x = x + attended @ own["self_attn.o_proj"].T
        inside = norm(x, own["post_attention_layernorm"])
        gated = F.silu(inside @ own["mlp.gate_proj"].T) * (inside @ own["mlp.up_proj"].T)
        x = x + gated @ own["mlp.down_proj"].T
    head = tensors["lm_head.weight"]
    if unit_rows:
        head = head / head.norm(dim=1, keepdim=True)
    return norm(x, tensors["model.norm.weight"]) @ head.T


@pytest.mark.parametrize(
    ("vocab_size", "unit_rows"), [(512, False), (BAICHUAN2_VOCABULARY, True)], ids=["1", "2"]
)
def test_logits_of_baichuan_13b_are_those_of_its_formulas(
    tmp_path: Path, vocab_size: int, unit_rows: bool
) -> None:
    expected = logits_of(make_checkpoint(tmp_path, vocab_size), IDS, unit_rows=unit_rows)
    model = load(tmp_path)
    paged = PagedModel(model)

    whole = paged.step(whole=IDS)["whole"]
    pieces = [IDS[:17], IDS[17:38], *([token] for token in IDS[38:])]
    stepwise = torch.cat([paged.step(pieces=piece)["pieces"] for piece in pieces])

    assert model.config.max_position == 128
    assert expected.std() > 0.1
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(stepwise, expected, atol=2e-4, rtol=1e-4)
