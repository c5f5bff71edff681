"""How often a draft is right that is drawn with the random number of its position.

    python -m tests.benchmarks.speculation.coupling [--tokens 128]

The target is SmolLM2. Draft models are the same model with weights rounded to 4 bits, and with
some of its layers left out, one better and one worse than a real draft model. At every position of
texts that the target has sampled, both have a distribution, p and q. The rows of the table are ways
to draw a token; a draft is right if target and draft draw the same one.

    inverse   one number for the position, inverted in the order of token ids
    race      a number for each token of the position (argmin e / p): what remora does
    blocks    a race of blocks of ids, then one within the block that won
    rejection the most that any way can reach: sum min(p, q)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from remora.configs.environment import cache_dir
from remora.engine.llm import LLM, SamplingParams
from remora.engine.weights.resolve_model import SMOLLM2, resolve_model
from tests.benchmarks.speculation.run import prompts_of

GROUP, LEVELS = 32, 7
DRAWS = 64
BLOCK = 128
TEMPERATURES = (1.0, 0.6)
NUM_PROMPTS = 10


def load() -> Any:
    path = resolve_model(SMOLLM2, cache_dir())
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def rounded(model: Any) -> Any:
    """Round the weights of all layers to 4 bits in groups of inputs, in place."""
    for layer in model.model.layers:
        for part in layer.modules():
            if isinstance(part, torch.nn.Linear):
                groups = part.weight.data.view(len(part.weight), -1, GROUP)
                scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / LEVELS
                part.weight.data = ((groups / scale).round() * scale).flatten(1)
    return model


def without(model: Any, layers: range) -> Any:
    kept = [layer for number, layer in enumerate(model.model.layers) if number not in layers]
    model.model.layers = torch.nn.ModuleList(kept)
    for number, layer in enumerate(kept):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(kept)
    return model


def sampled(temperature: float, num_tokens: int) -> list[tuple[list[int], int]]:
    """Return texts of the target, and where its own tokens begin."""
    llm = LLM(SMOLLM2, max_running_requests=NUM_PROMPTS, kv_tokens=16_384, show_progress=False)
    prompts = [prompt.text for prompt in prompts_of("free")[:NUM_PROMPTS]]
    messages = [[{"role": "user", "content": text}] for text in prompts]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens)
        for seed in range(len(prompts))
    ]
    done = [llm.chat(each, one)[0] for each, one in zip(messages, params, strict=True)]
    llm.close()
    return [
        (each.prompt_token_ids + each.completions[0].token_ids, len(each.prompt_token_ids))
        for each in done
    ]


@torch.inference_mode()
def distributions(model: Any, text: list[int], first: int, temperature: float) -> Tensor:
    """Return the probabilities of each token that the target drew [N, V]."""
    logits = model(torch.tensor([text[:-1]])).logits[0, first - 1 :]
    probabilities: Tensor = (logits.double() / temperature).softmax(-1)
    return probabilities


def inverse(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability [N] that the same number picks the same token of both."""
    ends_p, ends_q = p.cumsum(-1), q.cumsum(-1)
    return (torch.minimum(ends_p, ends_q) - torch.maximum(ends_p - p, ends_q - q)).clamp(0).sum(-1)


def race(p: Tensor, q: Tensor, block: int) -> Tensor:
    """Return the share [N] of draws in which the same numbers pick the same token of both.

    block:  ids that race with each other, after their block has won a race of blocks
    """
    padded = [F.pad(each, (0, -p.shape[1] % block)) for each in (p, q)]
    blocks = [each.view(len(p), -1, block) for each in padded]
    equal = torch.zeros(len(p), dtype=torch.float64)
    rows = torch.arange(len(p))
    for _ in range(DRAWS):
        of_blocks = torch.empty(blocks[0].shape[:2], dtype=torch.float64).exponential_()
        of_tokens = torch.empty(blocks[0].shape[::2], dtype=torch.float64).exponential_()
        first, second = ((of_blocks / each.sum(-1)).argmin(-1) for each in blocks)
        picked, other = (
            (of_tokens / each[rows, at]).argmin(-1)
            for each, at in zip(blocks, (first, second), strict=True)
        )
        equal += (first == second) & (picked == other)
    return equal / DRAWS


def rejection(p: Tensor, q: Tensor) -> Tensor:
    """Return the greatest probability [N] with which any two draws are equal."""
    return torch.minimum(p, q).sum(-1)


def rows(num_tokens: int) -> Iterator[tuple[float, str, list[float]]]:
    drafts = {
        "4 bits": rounded(load()),
        "24 of 30 layers": without(load(), range(18, 24)),
        "15 of 30 layers": without(load(), range(10, 25)),
    }
    target = load()
    for temperature in TEMPERATURES:
        texts = sampled(temperature, num_tokens)
        for name, model in drafts.items():
            made: list[Tensor] = []
            for text, first in texts:
                p, q = (distributions(each, text, first, temperature) for each in (target, model))
                ways = inverse(p, q), race(p, q, p.shape[1]), race(p, q, BLOCK), rejection(p, q)
                made.append(torch.stack(ways))
            yield temperature, name, torch.cat(made, 1).mean(1).tolist()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    torch.manual_seed(0)
    names = ("inverse", "race", "blocks", "rejection")
    print(f"{'T':>4} {'draft':16} " + "".join(f"{name:>11}" for name in names))
    for temperature, name, shares in rows(parser.parse_args().tokens):
        print(f"{temperature:4} {name:16} " + "".join(f"{share:11.3f}" for share in shares))


if __name__ == "__main__":
    main()
