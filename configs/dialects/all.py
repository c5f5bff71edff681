"""All dialects, by name."""

from __future__ import annotations

from collections.abc import Mapping

from remora.configs.dialects.backend import BACKEND
from remora.configs.dialects.catalogue import System
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.lightllm import LIGHTLLM
from remora.configs.dialects.ray_serve_llm.rules import RAY_SERVE_LLM
from remora.configs.dialects.rtp_llm import RTP_LLM
from remora.configs.dialects.sglang import SGLANG
from remora.configs.dialects.vllm.rules import VLLM

DIALECTS: Mapping[System, Dialect] = {
    dialect.system: dialect for dialect in (SGLANG, LIGHTLLM, RTP_LLM, BACKEND, VLLM, RAY_SERVE_LLM)
}
