"""Launch commands of vLLM and files of Ray Serve LLM, as their public documentation has them.

Variables of the shell have values, and MODEL stands where a test puts a model that is there.
"""

from __future__ import annotations

from typing import NamedTuple

_RECIPES = "https://github.com/vllm-project/recipes/blob"
_VLLM = "https://github.com/vllm-project/vllm/blob"
_RAY = "https://github.com/ray-project/ray/blob"
_KUBERAY = "https://github.com/ray-project/kuberay/blob"


class Launch(NamedTuple):
    """One command or file.

    source:   where the documentation has it
    model:    the model that it names, in the text
    text:     the command, or the file
    refused:  part of the message if it is refused; "" = it is accepted
    stops:    part of the message if its model cannot be served as asked; "" = it starts
    """

    source: str
    model: str
    text: str
    refused: str = ""
    stops: str = ""


_CODER = f"{_RECIPES}/0205f5398c74021b42b2e1b8cfc6b47df8554243/Qwen/Qwen3-Coder-480B-A35B.md"
_DEEPSEEK = f"{_RECIPES}/2bd6bc4ef178f16e5a8daa6a87d8933edf519651/DeepSeek/DeepSeek-V3_1.md"
_SEED = f"{_RECIPES}/043955186e048f65fb6aec1cdfbfff7b35714c09/Seed/Seed-OSS-36B.md"
_VISION = f"{_RECIPES}/1108854468aa1fee754efc885fb452293c96dedb/Qwen/Qwen2.5-VL.md"
_KIMI = f"{_RECIPES}/4674a8d17288e55e7d3842e34c0b2e931916dd29/moonshotai/Kimi-K2.md"
_ERNIE = f"{_RECIPES}/1229fc250cc06637f6357e97aaa11ed5a5b2d17a/Ernie/Ernie4.5.md"
_GGUF = f"{_VLLM}/06fed1cf05a759ebbea0032a54b4f988d7b63710/docs/features/quantization/gguf.md"
_LORA = f"{_VLLM}/05863f17683849086f056a80d1163edb761b3449/docs/features/lora.md"

COMMANDS = (
    Launch(
        _CODER,
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        "vllm serve Qwen/Qwen3-Coder-480B-A35B-Instruct --tensor-parallel-size 8 "
        "--max-model-len 32000 --enable-auto-tool-choice --tool-call-parser qwen3_coder",
    ),
    Launch(
        _CODER,
        "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
        "VLLM_USE_DEEP_GEMM=1 vllm serve Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8 "
        "--enable-expert-parallel --data-parallel-size 8 --enable-auto-tool-choice "
        "--tool-call-parser qwen3_coder",
        "not yet: experts divided over data-parallel ranks",
    ),
    Launch(
        _DEEPSEEK,
        "deepseek-ai/DeepSeek-V3.1",
        "vllm serve deepseek-ai/DeepSeek-V3.1 --enable-expert-parallel --tensor-parallel-size 8 "
        "--served-model-name ds31",
    ),
    Launch(
        _DEEPSEEK,
        "deepseek-ai/DeepSeek-V3.1",
        "SAFETENSORS_FAST_GPU=1 VLLM_USE_TRITON_FLASH_ATTN=0 VLLM_ROCM_USE_AITER=1 "
        "VLLM_ROCM_USE_AITER_MOE=1 vllm serve deepseek-ai/DeepSeek-V3.1 --tensor-parallel-size 8 "
        "--enable-expert-parallel",
    ),
    Launch(
        f"{_RECIPES}/0bf258697cc336ed2b0ab6c509840267cfb53b34/GLM/GLM-4.5.md",
        "zai-org/GLM-4.5-Air-FP8",
        "vllm serve zai-org/GLM-4.5-Air-FP8 --tensor-parallel-size 8 --tool-call-parser glm45 "
        "--reasoning-parser glm45 --enable-auto-tool-choice",
    ),
    Launch(
        f"{_RECIPES}/132fdcf43936e120c8b8a47c28b3dcdbb938f689/Llama/Llama3.1.md",
        "meta-llama/Llama-3.1-8B-Instruct",
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --disable-log-requests -tp 1",
    ),
    Launch(
        f"{_RECIPES}/0d5956ebf7b1b326373e7e3b1aded8dd9319bf02/Qwen/Qwen3.md",
        "Qwen/Qwen3-235B-A22B",
        "HIP_VISIBLE_DEVICES=4,5,6,7 VLLM_USE_V1=1 VLLM_ROCM_USE_AITER=1 vllm serve "
        "Qwen/Qwen3-235B-A22B --trust-remote-code -tp 4 --disable-log-requests --swap-space 32 "
        "--distributed-executor-backend mp --max-num-batched-tokens 32768 --max-model-len 32768 "
        "--no-enable-prefix-caching --gpu-memory-utilization 0.8",
    ),
    Launch(
        _SEED,
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "vllm serve ByteDance-Seed/Seed-OSS-36B-Instruct --host localhost --port 8000 "
        "--tensor-parallel-size 8 --enable-auto-tool-choice --tool-call-parser seed_oss",
    ),
    Launch(
        _VISION,
        "Qwen/Qwen2.5-VL-72B-Instruct",
        "vllm serve Qwen/Qwen2.5-VL-72B-Instruct --host 0.0.0.0 --port 8000 "
        "--tensor-parallel-size 4 --mm-encoder-tp-mode data "
        """--limit-mm-per-prompt '{"image":2,"video":0}'""",
    ),
    Launch(
        _VISION,
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "vllm serve Qwen/Qwen2.5-VL-7B-Instruct --host 0.0.0.0 --port 8000 "
        """--data-parallel-size 4 --limit-mm-per-prompt '{"image":2,"video":0}'""",
    ),
    Launch(
        _KIMI,
        "moonshotai/Kimi-K2-Instruct",
        "vllm serve moonshotai/Kimi-K2-Instruct --trust-remote-code --tokenizer-mode auto "
        "--tensor-parallel-size 8 --pipeline-parallel-size 2 --dtype bfloat16 --quantization fp8 "
        "--max-model-len 2048 --max-num-seqs 1 --max-num-batched-tokens 1024 "
        "--enable-chunked-prefill --disable-log-requests --kv-cache-dtype fp8",
        stops="the model caches latents (MLA)",
    ),
    Launch(
        _LORA,
        "meta-llama/Llama-2-7b-hf",
        "vllm serve meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql-lora=ADAPTER",
    ),
    Launch(
        _LORA,
        "meta-llama/Llama-2-7b-hf",
        "vllm serve meta-llama/Llama-2-7b-hf --enable-lora --lora-modules "
        """'{"name": "sql-lora", "path": "ADAPTER", "base_model_name": "meta-llama/Llama-2-7b"}'""",
    ),
    Launch(
        f"{_VLLM}/08fbd35d833451df301100c62fb24a88d4b9d489/docs/features/spec_decode.md",
        "facebook/opt-6.7b",
        "python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 --model "
        "facebook/opt-6.7b --seed 42 -tp 1 --gpu_memory_utilization 0.8 --speculative_config "
        """'{"model": "DRAFT", "num_speculative_tokens": 5}'""",
    ),
    Launch(
        f"{_VLLM}/02319794a1415e663baaf6de2f8197f795bd8c03/docs/deployment/docker.md",
        "meta-llama/Llama-3.1-8B-Instruct",
        "docker run --rm --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface "
        "-v vllm-cache:/root/.cache/vllm -p 8000:8000 vllm/vllm-openai:latest "
        "meta-llama/Llama-3.1-8B-Instruct",
    ),
    Launch(
        _GGUF,
        "./Qwen3-0.6B-Q4_K_M.gguf",
        "vllm serve ./Qwen3-0.6B-Q4_K_M.gguf --tokenizer DRAFT --dtype float16",
    ),
    Launch(
        f"{_RECIPES}/2f784e2c323243151ffff9a8bc02563ac9f63947/Microsoft/Phi-4.md",
        "microsoft/Phi-4-mini-instruct",
        "vllm serve microsoft/Phi-4-mini-instruct --host 0.0.0.0 --max-model-len 4000",
    ),
    Launch(
        _ERNIE,
        "baidu/ERNIE-4.5-300B-A47B-PT",
        "vllm serve baidu/ERNIE-4.5-300B-A47B-PT --tensor-parallel-size 8 "
        "--gpu-memory-utilization=0.95 --quantization fp8",
    ),
    Launch(
        _ERNIE,
        "baidu/ERNIE-4.5-21B-A3B-PT",
        "vllm serve baidu/ERNIE-4.5-21B-A3B-PT --speculative-config "
        """'{"method": "ernie_mtp","model": "DRAFT","num_speculative_tokens": 1}'""",
        "not offered: the method ernie_mtp",
    ),
    Launch(
        _ERNIE,
        "baidu/ERNIE-4.5-21B-A3B-PT/",
        "VLLM_ROCM_USE_AITER=1 SAFETENSORS_FAST_GPU=1 vllm serve baidu/ERNIE-4.5-21B-A3B-PT/ "
        "--tensor-parallel-size 4 --gpu-memory-utilization 0.9 --disable-log-requests "
        "--no-enable-prefix-caching --trust-remote-code",
    ),
)

# More than the twenty, for other architectures.
FURTHER = (
    Launch(
        f"{_RECIPES}/00143a1a4aace5143b6825bcaa0fc30505015c61/OpenAI/GPT-OSS.md",
        "openai/gpt-oss-120b",
        "vllm serve openai/gpt-oss-120b --tensor_parallel_size 8 --max-model-len 131072 "
        "--max-num-batched-tokens 10240 --max-num-seqs 128 --gpu-memory-utilization 0.85 "
        "--no-enable-prefix-caching",
    ),
)

_TWO = """\
applications:
- args:
    llm_configs:
    - model_loading_config: {model_id: qwen-0.5b, model_source: MODEL}
      accelerator_type: A10G
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 2}
    - model_loading_config: {model_id: qwen-1.5b, model_source: MODEL}
      accelerator_type: A10G
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 2}
  import_path: ray.serve.llm:build_openai_app
  name: llm_app
  route_prefix: "/"
"""
_QWEN = """\
model_loading_config: {model_id: qwen-0.5b, model_source: MODEL}
accelerator_type: A10G
deployment_config:
  autoscaling_config: {min_replicas: 1, max_replicas: 2}
"""
_TOOLS = """\
applications:
- name: llm-direct-streaming
  route_prefix: /
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: qwen3.5-0.8b, model_source: MODEL}
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 4}
      engine_kwargs:
        trust_remote_code: true
        tensor_parallel_size: 1
        enable_auto_tool_choice: true
        tool_call_parser: qwen3_coder
        reasoning_parser: qwen3
"""
_KUBE = """\
applications:
- name: llms
  import_path: ray.serve.llm:build_openai_app
  route_prefix: "/"
  args:
    llm_configs:
    - model_loading_config: {model_id: qwen2.5-7b-instruct, model_source: MODEL}
      engine_kwargs:
        dtype: bfloat16
        max_model_len: 1024
        device: auto
        gpu_memory_utilization: 0.75
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 4, target_ongoing_requests: 64}
        max_ongoing_requests: 128
"""
_LLAMA = """\
applications:
- name: my-small-llm-app
  route_prefix: "/"
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: my-llama-3.1-8B, model_source: MODEL}
      accelerator_type: L4
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 2}
      engine_kwargs:
        max_model_len: 8192
        hf_token: <YOUR-TOKEN-HERE>
"""
_ADAPTERS = """\
llm_configs:
- model_loading_config: {model_id: qwen-0.5b, model_source: MODEL}
  lora_config:
    dynamic_lora_loading_path: s3://my_dynamic_lora_path
    max_num_adapters_per_replica: 16
  engine_kwargs: {enable_lora: true, max_loras: 16}
  deployment_config:
    autoscaling_config: {min_replicas: 1, max_replicas: 2}
  accelerator_type: A10G
"""
_CODE = "doc/source/llm/doc_code/serve"
_GUIDES = "doc/source/serve/llm"
FILES = (
    Launch(
        f"{_RAY}/b2dfbca23c9fce51025280699ed3aca475dd3f4f/{_CODE}/qwen/llm_config_example.yaml",
        "MODEL",
        _TWO,
    ),
    Launch(
        f"{_RAY}/fce2fc41f68b28c5dda234bf9d2d5ff7adefc5ac/{_GUIDES}/quick-start.md", "MODEL", _QWEN
    ),
    Launch(
        f"{_RAY}/674975070b208e263e853761852b01828bf64326/{_CODE}/direct_streaming/"
        "direct_streaming_config.yaml",
        "MODEL",
        _TOOLS,
        stops="The architecture Qwen3_5ForConditionalGeneration",
    ),
    Launch(
        f"{_KUBERAY}/0ca871806c4fe4f495e20ec7493d3f0e4e2fd4b7/ray-operator/config/samples/"
        "ray-service.llm-serve.yaml",
        "MODEL",
        _KUBE,
    ),
    Launch(
        f"{_RAY}/25d73bab9dffb07f9f0089014a837eaca107648e/{_GUIDES}/user-guides/multi-lora.md",
        "MODEL",
        _ADAPTERS,
    ),
    Launch(
        f"{_RAY}/4a16cb95c59b8b6654abe3696f4beb4eec67618c/{_CODE}/llama3_8B/"
        "serve_my_llama_3_1_8B.yaml",
        "MODEL",
        _LLAMA,
        "set the variable HF_TOKEN",
    ),
)
