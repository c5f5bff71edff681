"""Draft heads in plain torch, over whole texts: files with random weights, and what they draft.

Written from the papers' formulas with layers of transformers; shares nothing with remora's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

DRAFT_VOCAB = 300
# Of an MTP layer: the norms of embeddings, states and output, and what joins the first two.
DEEPSEEK_NAMES = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")


def randomised(shapes: dict[str, tuple[int, ...]], seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.2
        + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        for name, shape in shapes.items()
    }


def layer_shapes(raw: dict[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama layer whose attention reads `inputs` numbers."""
    size, inner = raw["hidden_size"], raw["intermediate_size"]
    queries = raw["num_attention_heads"] * raw["head_dim"]
    keys = raw["num_key_value_heads"] * raw["head_dim"]
    return {
        "self_attn.q_proj.weight": (queries, inputs),
        "self_attn.k_proj.weight": (keys, inputs),
        "self_attn.v_proj.weight": (keys, inputs),
        "self_attn.o_proj.weight": (size, queries),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
        "post_attention_layernorm.weight": (size,),
    }


def write_eagle(folder: Path, target: Path, *, bias: bool, pickled: bool = False) -> Path:
    """Write an EAGLE head for a Llama."""
    raw = json.loads((target / "config.json").read_text())
    size = raw["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 2 * size)}
    if bias:
        shapes["fc.bias"] = (size,)
    shapes |= {f"layers.0.{name}": shape for name, shape in layer_shapes(raw, size).items()}
    _write(folder, {**raw, "architectures": ["LlamaForCausalLMEagle"]}, randomised(shapes), pickled)
    return folder


def write_eagle_3(
    folder: Path, target: Path, *, draft_vocab: int | None = DRAFT_VOCAB, **keys: Any
) -> Path:
    """Write an EAGLE-3 head for a Llama, with a vocabulary of its own."""
    raw = json.loads((target / "config.json").read_text())
    size, vocab = raw["hidden_size"], raw["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 3 * size),
        "norm.weight": (size,),
        "lm_head.weight": (draft_vocab or vocab, size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
    }
    shapes |= {f"midlayer.{name}": shape for name, shape in layer_shapes(raw, 2 * size).items()}
    tensors = randomised(shapes)
    if draft_vocab is not None:
        generator = torch.Generator().manual_seed(3)
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.isin(torch.arange(vocab), ids)
        raw["draft_vocab_size"] = draft_vocab
    _write(folder, {**raw, "architectures": ["LlamaForCausalLMEagle3"], **keys}, tensors, False)
    return folder


def add_mtp(folder: Path) -> dict[str, Tensor]:
    """Add an MTP layer to a checkpoint of DeepSeek-V3 or MiMo.

    Returns its tensors by their last names.
    """
    file = folder / "model.safetensors"
    tensors, raw = load_file(file), json.loads((folder / "config.json").read_text())
    count, size = raw["num_hidden_layers"], raw["hidden_size"]
    prefix = f"model.layers.{count - 1}."
    shapes = {
        name.removeprefix(prefix): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    is_mimo = raw["architectures"] == ["MiMoForCausalLM"]
    names = MIMO_NAMES if is_mimo else DEEPSEEK_NAMES
    shapes |= {f"{name}.weight": (size,) for name in names[:3]}
    shapes[f"{names[3]}.weight"] = (size, 2 * size)
    own = randomised(shapes)
    copies = {"embed_tokens.weight": "model.embed_tokens", "shared_head.head.weight": "lm_head"}
    copied = {name: tensors[f"{source}.weight"].clone() for name, source in copies.items()}
    layer = "model.mtp_layers.0" if is_mimo else f"model.layers.{count}"
    added = own if is_mimo else own | copied
    tensors |= {f"{layer}.{name}": each for name, each in added.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 1}))
    return own


def _write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], pickled: bool) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


Layer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes embeddings [T, H] and states; returns what the head reads and the next states."""


class PlainHead:
    """A head over a whole text.

    layer:  of the family
    """

    def __init__(self, target: Path, layer: Callable[..., Any], ids: Tensor | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.layer, self.ids = layer, ids

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Return greedy drafts after a text."""
        found = self.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        states: list[Any] = [each[0, :-1] for each in found]
        tokens, drafts, own = list(token_ids[1:]), [], None
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor(tokens))
            logits, states_out = self.layer(self.model, embedded, states, own)
            best = int(logits.argmax())
            drafts.append(best if self.ids is None else int(self.ids[best]))
            own = states_out[None] if own is None else torch.cat((own, states_out[None]))
            tokens.append(drafts[-1])
        return drafts


def eagle_head(target: Path, folder: Path) -> PlainHead:
    """EAGLE: fc(embedding, last state), then a layer without its first norm."""
    config = LlamaConfig.from_pretrained(target)
    file = folder / "model.safetensors"
    tensors = load_file(file) if file.exists() else torch.load(folder / "pytorch_model.bin")
    module = _llama_layer(config, tensors, "layers.0.")
    module.input_layernorm = nn.Identity()
    rotary = LlamaRotaryEmbedding(config)

    def layer(model: Any, embedded: Tensor, states: Any, own: Tensor | None) -> Any:
        hidden = states[-1] if own is None else torch.cat((states[-1], own))
        joined = torch.cat((embedded, hidden), 1)
        x = F.linear(joined, tensors["fc.weight"], tensors.get("fc.bias"))
        x = _attend(module, rotary, x)
        return model.lm_head(x[-1]), x[-1]

    return PlainHead(target, layer)


def eagle_3_head(target: Path, folder: Path, captures: tuple[int, int, int]) -> PlainHead:
    """EAGLE-3: attention reads both normalised inputs, and adds to the joined states."""
    config = LlamaConfig.from_pretrained(target)
    tensors = load_file(folder / "model.safetensors")
    module = _llama_layer(config, tensors, "midlayer.", wide=True)
    rotary = LlamaRotaryEmbedding(config)
    ids = None
    if "d2t" in tensors:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def norm(name: str, x: Tensor) -> Tensor:
        weight = tensors[name]
        return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)

    def layer(model: Any, embedded: Tensor, states: Any, own: Tensor | None) -> Any:
        hidden = F.linear(torch.cat([states[each] for each in captures], 1), tensors["fc.weight"])
        if own is not None:
            hidden = torch.cat((hidden, own))
        both = torch.cat(
            (
                norm("midlayer.input_layernorm.weight", embedded),
                norm("midlayer.hidden_norm.weight", hidden),
            ),
            1,
        )
        x = hidden + _attention(module, rotary, both)
        x = x + module.mlp(module.post_attention_layernorm(x))
        return F.linear(norm("norm.weight", x[-1]), tensors["lm_head.weight"]), x[-1]

    return PlainHead(target, layer, ids)


def mtp_head(target: Path, own: dict[str, Tensor]) -> PlainHead:
    """An MTP layer: one like the model's last, over a projection of both norms.

    DeepSeek-V3 joins embeddings and states, MiMo states and embeddings.
    """
    head = PlainHead(target, lambda *_: None)
    inner = head.model.model
    module = inner.layers[-1].__class__(head.model.config, len(inner.layers) - 1)
    keys = set(module.state_dict())
    theirs = inner.layers[-1].state_dict()
    module.load_state_dict({key: _fused(key, own, theirs[key]) for key in keys})
    module.eval()
    eps = head.model.config.rms_norm_eps
    is_mimo = f"{MIMO_NAMES[3]}.weight" in own
    first, second, last, fc = MIMO_NAMES if is_mimo else DEEPSEEK_NAMES

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], own[f"{name}.weight"], eps)

    def layer(model: Any, embedded: Tensor, states: Any, mine: Tensor | None) -> Any:
        hidden = states[-1] if mine is None else torch.cat((states[-1], mine))
        parts = [norm(first, embedded), norm(second, hidden)]
        joined = torch.cat(parts[::-1] if is_mimo else parts, 1)
        x = F.linear(joined, own[f"{fc}.weight"])
        x = _attend(module, inner.rotary_emb, x)
        final = norm(last, x[-1])
        return model.lm_head(final), final

    head.layer = layer
    return head


def _fused(key: str, own: dict[str, Tensor], like: Tensor) -> Tensor:
    """Return a tensor of transformers' layer, whose experts are fused."""
    if key in own:
        return own[key]
    count = like.shape[0]
    if key.endswith("gate_up_proj"):
        parts = [
            torch.cat([own[f"mlp.experts.{at}.{part}.weight"] for part in ("gate_proj", "up_proj")])
            for at in range(count)
        ]
    else:
        parts = [own[f"mlp.experts.{at}.down_proj.weight"] for at in range(count)]
    return torch.stack(parts).reshape(like.shape)


def _llama_layer(
    config: LlamaConfig, tensors: dict[str, Tensor], prefix: str, *, wide: bool = False
) -> Any:
    config._attn_implementation = "eager"
    module = LlamaDecoderLayer(config, 0)
    if wide:
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(module.self_attn, name)
            new = nn.Linear(2 * config.hidden_size, old.out_features, bias=False)
            setattr(module.self_attn, name, new)
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    known = module.state_dict().keys()
    module.load_state_dict(
        {name: each for name, each in own.items() if name in known}, strict=False
    )
    return module.eval()


def _mask(count: int) -> Tensor:
    return torch.full((count, count), -torch.inf).triu(1)[None, None]


def _attend(module: Any, rotary: Any, x: Tensor) -> Tensor:
    positions = torch.arange(len(x))[None]
    found = module(
        x[None],
        attention_mask=_mask(len(x)),
        position_ids=positions,
        position_embeddings=rotary(x[None], positions),
    )
    attended: Tensor = (found[0] if isinstance(found, tuple) else found).view_as(x)
    return attended


def _attention(module: Any, rotary: Any, x: Tensor) -> Tensor:
    positions = torch.arange(len(x))[None]
    found, _ = module.self_attn(
        x[None],
        attention_mask=_mask(len(x)),
        position_embeddings=rotary(x[None], positions),
    )
    attended: Tensor = found[0]
    return attended
