"""Tiny random checkpoints, saved as published checkpoints are.

Weights are large enough to separate the best logit from the next: with the usual 0.02, all logits
are nearly equal, and greedy decoding would test only rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.tiny_experts import EXPERT_FAMILIES

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "What is the capital of France? Paris is the capital of France, and Rome that of Italy.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "In the beginning there was a system, a user and an assistant; 0123456789 tokens later, none.",
    "Sphinx of black quartz, judge my vow; every engine room holds pages, slots and a scheduler.",
    "Grüße aus München, ça va? Привет, мир! 你好，世界。こんにちは 🙂🚀 naïve café",
)

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: Mapping[str, tuple[type, type, Mapping[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-bias": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "dynamic-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
            "max_position_embeddings": 64,
        },
    ),
    "yarn-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2.5-tied": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"tie_word_embeddings": True, "num_attention_heads": 4, "use_sliding_window": False},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


def make_tiny_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """Write a model of `family` (a key of FAMILIES or EXPERT_FAMILIES) with tokenizer and template.

    overrides:  config settings; `dtype` also says how the weights are stored, and
                `max_shard_size` goes to save_pretrained
    """
    config_class, model_class, settings = {**FAMILIES, **EXPERT_FAMILIES}[family]
    shard_size = overrides.pop("max_shard_size", "1GB")
    dtype = overrides.pop("dtype", torch.float32)
    config = config_class(**{**COMMON, **settings, **overrides})
    model = model_class(config)
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
        for name, values in model.named_buffers():
            if name.endswith("correction_bias"):
                values.normal_(0.0, 0.1, generator=generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of VOCAB_SIZE entries; it knows every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
