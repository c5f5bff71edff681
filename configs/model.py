"""Which weights, by which name, in which number format: the section `model`, tokenizer included."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Name, Section, conflict


class ModelSection(Section):
    """Which model is served, by which name, in which number format."""

    path: Name
    """Folder in Hugging Face layout, a .gguf file, or the built-in model smollm2-135m-instruct.
    Best absolute: a relative path counts from the folder that the replica runs in."""

    served_name: Name | None = None
    """Name that clients put into `model`. Default: the last part of `path`, without .gguf."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights, activations and KV cache; auto = the checkpoint's own."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Format that the weights are rounded to at start-up, on a CPU with native kernels: int8 halves
    them (groups of 64), int4 makes them a third (groups of 32; the head stays int8)."""

    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """How weights are read; dummy = random numbers, for trials without weight files."""

    context_length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most tokens of one sequence, prompt and output. Default: what the model was made for."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.path.endswith(".gguf") and self.load_format == "safetensors":
            raise conflict("load_format", "path is a .gguf file; use load_format auto or gguf")
        return self
