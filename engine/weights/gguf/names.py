"""Maps the names of a GGUF file's tensors to the model's names.

GGUF has the same names for all families. One tensor of the file may hold several of the model's: an
expert or a head for each entry of its first axis, or several projections in its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

EMBEDDING = "token_embd.weight"
ROPE_DIVISORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
# Made of settings, or read as settings.
NO_WEIGHTS = (ROPE_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
NO_WEIGHTS_OF_BLOCKS = ("attn_rot_embd",)

Names = Mapping[str, str | tuple[str, ...]]

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
TOP_NAMES: dict[str, str | tuple[str, ...]] = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# {} stands for the number of an entry of the first axis.
BLOCK_NAMES: dict[str, str | tuple[str, ...]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": QKV,
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# Ours are neither a weight nor a bias of something.
BARE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}


def our_names(name: str, of_family: Names) -> tuple[str, ...]:
    """Return the model's names of a tensor; an unknown tensor keeps its name.

    of_family:  names of a block's parts, replacing BLOCK_NAMES
    """
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return (f"{TOP_NAMES[stem]}.{suffix}",)
    block = block_of(name)
    if block is None:
        return (name,)
    part = name.split(".", 2)[2]
    prefix = f"model.layers.{block}."
    if part in BARE_NAMES:
        return (f"{prefix}{BARE_NAMES[part]}",)
    inner = part.removesuffix(f".{suffix}")
    found = of_family.get(inner, BLOCK_NAMES.get(inner))
    if found is None:
        return (name,)
    inside = (found,) if isinstance(found, str) else found
    return tuple(f"{prefix}{one}.{suffix}" for one in inside)


def block_of(name: str) -> int | None:
    """Return the number of a tensor's block; None = outside of blocks."""
    parts = name.split(".")
    if len(parts) < 4 or parts[0] != "blk" or not parts[1].isdecimal():
        return None
    return int(parts[1])


def is_weight(name: str, num_layers: int) -> bool:
    """Return whether the model computes with a tensor (not so in multi-token prediction blocks)."""
    block = block_of(name)
    if block is None:
        return name not in NO_WEIGHTS
    return block < num_layers and name.split(".")[2] not in NO_WEIGHTS_OF_BLOCKS
