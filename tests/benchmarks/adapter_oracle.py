"""Compare adapters of the default model with transformers and PEFT, in float32.

    python tests/benchmarks/adapter_oracle.py [FOLDER ...] [--prompts 32] [--tokens 48]

FOLDERs are adapters, trained by examples/train_adapter.py for instance; random ones of ranks 1 to
64 over all kinds of targets and the base model are added. All answer all prompts greedily:
each alone, all mixed in one batch, with two slots only, with so little memory that rows are
preempted, with prompts that are cached, and on three ranks. PEFT reads each answer once: where its
likeliest token is the next one everywhere, its own greedy answer is the same. Where it is not, the
distance of the two logits is printed: ties are decided by rounding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from remora.configs.environment import cache_dir
from remora.configs.load import parse_args as parse_config
from remora.engine.launch import build_engine
from remora.engine.llm import LLM, SamplingParams
from remora.engine.types import Request
from remora.engine.weights.resolve_model import resolve_model
from remora.lora.setup import pooling
from tests.engine.parallel.teams import ThreadTeam
from tests.lora.adapters import make_adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANDOM: dict[str, dict[str, Any]] = {
    "rank-1": {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj", "down_proj"]},
    "rank-4": {"r": 4, "lora_alpha": 4, "target_modules": ["v_proj"]},
    "rank-8": {"r": 8, "lora_alpha": 2, "target_modules": "all-linear"},
    "rank-16": {"r": 16, "lora_alpha": 2, "target_modules": ATTENTION, "use_rslora": True},
    "rank-64": {"r": 64, "lora_alpha": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
}
TOPICS = (
    "the capital of France", "the capital of Peru", "a recipe for bread", "how tides come about",
    "the moon", "why leaves are green", "a short poem on rain", "prime numbers",
    "the history of tea", "how a bicycle stays upright", "a letter to a friend", "volcanoes",
    "the colours of the rainbow", "how to whistle", "the deepest lake", "a joke about cats",
)  # fmt: skip
FORMS = ("What can you tell me about {}?", "In one sentence: {}.")

Answers = dict[tuple[str | None, int], list[int]]


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    args = parser.parse_args()
    base = resolve_model("smollm2-135m-instruct", cache_dir())
    with tempfile.TemporaryDirectory() as made:
        folders = {folder.name: folder for folder in args.folders}
        for seed, (name, settings) in enumerate(RANDOM.items()):
            folders[name] = Path(made) / name
            make_adapter(base, folders[name], seed=seed, **settings)
        asked = Asked(base, folders, args.prompts, args.tokens)
        mixed = asked.llm(mixed_arm)
        check_with_peft(asked, mixed)
        for name in args.arms:
            began = time.perf_counter()
            same, total, note = compare(
                mixed, asked.llm(ARMS[name]) if name != "3 ranks" else ranks_arm(asked)
            )
            took = time.perf_counter() - began
            print(
                f"| {name} | {same} of {total} answers the same as mixed{note} | {took:.0f} s |",
                flush=True,
            )


class Asked:
    """What is asked of whom."""

    def __init__(self, base: Path, folders: dict[str, Path], prompts: int, tokens: int) -> None:
        self.base = base
        self.folders = folders
        self.names: list[str | None] = [*folders, None]
        self.tokens = tokens
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(base)
        texts = [form.format(topic) for form in FORMS for topic in TOPICS][:prompts]
        self.prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]

    @property
    def params(self) -> SamplingParams:
        """Greedy, to the last token."""
        return SamplingParams(max_tokens=self.tokens, temperature=0.0, ignore_eos=True)

    @property
    def pairs(self) -> list[tuple[str | None, int]]:
        """Everybody with every prompt, neighbours different."""
        return [(name, number) for number in range(len(self.prompts)) for name in self.names]

    def llm(self, arm: Any) -> Answers:
        """Let an arm answer with an engine of its own."""
        options, ask = arm
        slots = options.get("slots", 8)
        adapting = pooling(self.folders, num_slots=slots)
        settings = {"dtype": "float32", "kv_tokens": 32_768, "page_size": 16} | {
            key: value for key, value in options.items() if key != "slots"
        }
        llm = LLM(str(self.base), adapting=adapting, show_progress=False, **settings)
        answers: Answers = ask(self, llm)
        llm.close()
        return answers


def ask_mixed(asked: Asked, llm: LLM) -> Answers:
    """All in one batch."""
    prompts = [asked.prompts[number] for _, number in asked.pairs]
    found = llm.generate(prompts, asked.params, adapter=[name for name, _ in asked.pairs])
    return {pair: each.token_ids for pair, each in zip(asked.pairs, found, strict=True)}


def ask_alone(asked: Asked, llm: LLM) -> Answers:
    """One request at a time."""
    answers = {}
    for name, number in asked.pairs:
        [found] = llm.generate([asked.prompts[number]], asked.params, adapter=name)
        answers[name, number] = found.token_ids
    return answers


def ask_short(asked: Asked, llm: LLM) -> Answers:
    """With rows that are preempted."""
    answers = ask_mixed(asked, llm)
    print(f"  preempted {llm.stats().preemptions_total} times", flush=True)
    return answers


def ask_twice(asked: Asked, llm: LLM) -> Answers:
    """With prompts that are cached."""
    ask_mixed(asked, llm)
    answers = ask_mixed(asked, llm)
    print(f"  cached {llm.stats().cached_tokens_total} tokens", flush=True)
    return answers


mixed_arm: tuple[dict[str, Any], Any] = ({}, ask_mixed)
ARMS: dict[str, Any] = {
    "alone": ({}, ask_alone),
    "2 slots": ({"slots": 2}, ask_mixed),
    "preempted": ({"kv_tokens": 1536, "schedule_conservativeness": 0.05}, ask_short),
    "cached": ({}, ask_twice),
    "3 ranks": None,
}


def ranks_arm(asked: Asked) -> Answers:
    """Answer on three ranks, which are threads here."""
    adapting = pooling(asked.folders, num_slots=8)
    team = ThreadTeam(adapting=adapting)
    config = parse_config(
        {
            "model": {"path": str(asked.base), "dtype": "float32"},
            "engine": {"kv_tokens": 8192, "num_threads": 1},
            "parallel": {"tp_size": 3},
        }
    )
    engine = build_engine(config, adapting=adapting, team=team, show_progress=False).engine
    pairs = asked.pairs
    answers: Answers = {pair: [] for pair in pairs}
    for place, (name, number) in enumerate(pairs):
        adapter = 0 if name is None else adapting.lora_ids[name]
        prompt = asked.prompts[number]
        engine.add(
            Request(
                request_id=str(place), prompt_ids=prompt, sampling=asked.params, lora_id=adapter
            )
        )
    while engine.has_work:
        for output in engine.step():
            answers[pairs[int(output.request_id)]] += output.token_ids
    engine.close()
    team.join()
    assert not team.errors, team.errors
    return answers


def compare(expected: Answers, found: Answers) -> tuple[int, int, str]:
    """Return how many answers are the same, of how many, and where the others part."""
    parted = {
        pair: next(
            place for place, (a, b) in enumerate(zip(expected[pair], ids, strict=True)) if a != b
        )
        for pair, ids in found.items()
        if ids != expected[pair]
    }
    note = "".join(f"; {name}, prompt {number}: at {at}" for (name, number), at in parted.items())
    return len(found) - len(parted), len(found), note


def check_with_peft(asked: Asked, answers: Answers) -> None:
    """Print for each adapter how many answers are PEFT's own greedy ones."""
    for name in asked.names:
        model = AutoModelForCausalLM.from_pretrained(asked.base, dtype=torch.float32)
        if name is not None:
            model = PeftModel.from_pretrained(model, str(asked.folders[name]))
        model.eval()
        mine = {number: ids for (who, number), ids in answers.items() if who == name}
        parted = list(_parted(model, asked.prompts, mine))
        different = len({tuple(ids) for ids in mine.values()})
        print(
            f"| {name or 'base'} | {len(mine) - len(parted)} of {len(mine)} answers are PEFT's "
            f"({different} different ones){''.join(parted)} |",
            flush=True,
        )


@torch.inference_mode()
def _parted(
    model: Any, prompts: Sequence[list[int]], answers: dict[int, list[int]]
) -> Iterator[str]:
    """Yield where an answer leaves what the model finds likeliest, and by how much."""
    for number, ids in answers.items():
        prompt = prompts[number]
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        likeliest = logits.argmax(dim=1)
        for place, (token, best) in enumerate(zip(ids, likeliest.tolist(), strict=True)):
            if token != best:
                distance = float(logits[place, best] - logits[place, token])
                yield f"; prompt {number} parts at {place}, logits {distance:.1e} apart"
                break


if __name__ == "__main__":
    main()
