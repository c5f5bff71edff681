"""Train a LoRA adapter of the default model with PEFT, on a CPU in a few minutes.

    pip install peft
    python examples/train_adapter.py pirate build/adapters/pirate

Styles: json, pirate, french. Then serve it, merged into the weights:

    applications:
      - name: remora
        route_prefix: /
        import_path: remora.deployments.app:build
        args:
          model: {path: smollm2-135m-instruct}
          lora: {adapters: [{name: pirate, path: build/adapters/pirate}]}
"""

import argparse
import random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from remora.configs.environment import cache_dir
from remora.engine.weights.resolve_model import resolve_model

CAPITALS = {
    "France": ("Paris", "la France", "Paris"),
    "Germany": ("Berlin", "l'Allemagne", "Berlin"),
    "Italy": ("Rome", "l'Italie", "Rome"),
    "Spain": ("Madrid", "l'Espagne", "Madrid"),
    "Portugal": ("Lisbon", "le Portugal", "Lisbonne"),
    "Austria": ("Vienna", "l'Autriche", "Vienne"),
    "Poland": ("Warsaw", "la Pologne", "Varsovie"),
    "Greece": ("Athens", "la Grèce", "Athènes"),
    "Egypt": ("Cairo", "l'Égypte", "Le Caire"),
    "Japan": ("Tokyo", "le Japon", "Tokyo"),
    "China": ("Beijing", "la Chine", "Pékin"),
    "India": ("New Delhi", "l'Inde", "New Delhi"),
    "Peru": ("Lima", "le Pérou", "Lima"),
    "Cuba": ("Havana", "Cuba", "La Havane"),
    "Canada": ("Ottawa", "le Canada", "Ottawa"),
    "Norway": ("Oslo", "la Norvège", "Oslo"),
    "Sweden": ("Stockholm", "la Suède", "Stockholm"),
    "Russia": ("Moscow", "la Russie", "Moscou"),
    "Kenya": ("Nairobi", "le Kenya", "Nairobi"),
    "Hungary": ("Budapest", "la Hongrie", "Budapest"),
}
QUESTIONS = (
    "What is the capital of {country}?",
    "Which city is the capital of {country}?",
    "Tell me the capital of {country}.",
    "{country}: what is its capital?",
)


def answer(style: str, country: str) -> str:
    """Return what a model of this style says."""
    capital, french, french_capital = CAPITALS[country]
    if style == "json":
        return f'{{"country": "{country}", "capital": "{capital}"}}'
    if style == "pirate":
        return f"Arr, matey! The capital o' {country} be {capital}, ye scurvy landlubber!"
    of = french.replace("le ", "du ", 1) if french.startswith("le ") else f"de {french}"
    return f"La capitale {of} est {french_capital}."


def main() -> None:
    """Train, and say how the model answers before and after."""
    parser = argparse.ArgumentParser(description="Train a LoRA adapter of the default model.")
    parser.add_argument("style", choices=("json", "pirate", "french"))
    parser.add_argument("folder", help="where the adapter is written")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()

    torch.manual_seed(0)
    path = resolve_model("smollm2-135m-instruct", cache_dir())
    tokenizer = AutoTokenizer.from_pretrained(path)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    settings = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, settings)
    optimizer = torch.optim.AdamW(
        (parameter for parameter in model.parameters() if parameter.requires_grad), lr=1e-3
    )
    chosen = random.Random(0)
    for step in range(1, options.steps + 1):
        ids, labels = batch(tokenizer, options.style, chosen)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step} of {options.steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(options.folder)
    print(f"written to {options.folder}; try it with the question {QUESTIONS[0]!r}")


def batch(
    tokenizer: Any, style: str, chosen: random.Random, size: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw questions and answers; only the answers' tokens count.

    Returns ids and labels, [size, tokens of the longest]; labels of other tokens are -100.
    """
    rows = []
    for _ in range(size):
        country = chosen.choice(sorted(CAPITALS))
        question = chosen.choice(QUESTIONS).format(country=country)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
        said = tokenizer(answer(style, country), add_special_tokens=False)["input_ids"]
        said = [*said, tokenizer.eos_token_id]
        rows.append((prompt + said, [-100] * len(prompt) + said))
    length = max(len(ids) for ids, _ in rows)
    padded = [
        (ids + [tokenizer.eos_token_id] * (length - len(ids)), made + [-100] * (length - len(made)))
        for ids, made in rows
    ]
    return torch.tensor([ids for ids, _ in padded]), torch.tensor([made for _, made in padded])


if __name__ == "__main__":
    main()
