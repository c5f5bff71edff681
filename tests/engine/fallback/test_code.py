"""Code that comes with a checkpoint: run for who asks, else named in the refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remora.configs.errors import ConfigError
from remora.engine.tokens.tokenizer import Tokenizer
from tests.engine.fallback.conftest import Checkpoints
from tests.engine.models.oracle import Oracle
from tests.engine.models.test_parity import ids, make_llm, make_prompts

MODEL_CODE = """
from pathlib import Path
from transformers import HeliumConfig, HeliumForCausalLM

Path({trace!r}).touch()

class OwnConfig(HeliumConfig):
    model_type = "own"

class OwnForCausalLM(HeliumForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        answer.logits = -answer.logits
        return answer
"""
TOKENIZER_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({trace!r}).touch()

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def rewrite(file: Path, **entries: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """What the code leaves behind when it is run."""
    return tmp_path / "was_run"


@pytest.fixture
def own(
    checkpoints: Checkpoints, tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A checkpoint that only its own code can run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "own"
    folder.mkdir()
    for file in checkpoints("helium").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "modeling_own.py").write_text(MODEL_CODE.format(trace=str(trace)))
    rewrite(
        folder / "config.json",
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    )
    return folder


@pytest.mark.observes("model.trust_remote_code")
def test_code_beside_weights_runs_for_who_trusts_it(
    own: Path, trace: Path, checkpoints: Checkpoints
) -> None:
    prompt = make_prompts([20])[0]

    (output,) = ids(make_llm(own, trust_remote_code=True), [prompt])

    assert trace.exists()
    lowest = Oracle(checkpoints("helium")).logits(prompt)[-1].argmin()
    assert output[0] == int(lowest)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_otherwise_the_refusal_names_the_file_and_the_key(
    own: Path, trace: Path, impl: str
) -> None:
    with pytest.raises(ConfigError, match=r"modeling_own\.py in .*model\.trust_remote_code"):
        make_llm(own, impl=impl)

    assert not trace.exists()


def test_code_of_another_repository_is_not_fetched(own: Path) -> None:
    rewrite(own / "config.json", auto_map={"AutoConfig": "else/where--modeling_own.OwnConfig"})

    with pytest.raises(ConfigError, match="another repository, else/where"):
        make_llm(own, trust_remote_code=True)


def test_a_tokenizers_code_is_refused_and_run_alike(own: Path, trace: Path) -> None:
    (own / "tokenization_own.py").write_text(TOKENIZER_CODE.format(trace=str(trace)))
    rewrite(
        own / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    )

    with pytest.raises(ConfigError, match=r"tokenization_own.*model\.trust_remote_code is true"):
        Tokenizer.load(own)
    assert not trace.exists()

    text = "The quick brown fox"
    tokenizer = Tokenizer.load(own, trust_code=True)
    assert trace.exists()
    assert (
        tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False
        )
        == text
    )
