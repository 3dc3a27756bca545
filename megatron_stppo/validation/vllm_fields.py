"""Check the options of `rollout.vllm:`, which go to vLLM's EngineArgs. Does not import vLLM."""

from __future__ import annotations

from megatron_stppo.config import Config
from megatron_stppo.validation import passed_on

# {what options of vLLM follow from: the options}. With other values of some of them, trainer and engine would
# not compute the same policy, or the records would lack tokens.
_FROM = {
    "model.path": """model tokenizer hf_config_path model_weights revision code_revision tokenizer_revision
        tokenizer_mode trust_remote_code hf_overrides served_model_name model_impl runner convert""",
    "model.dtype": "dtype",
    "model.lora": "enable_lora max_loras max_lora_rank lora_dtype max_cpu_loras",
    "run.seed": "seed",
    "deadlines": "distributed_timeout_seconds cpu_distributed_timeout_seconds",
    "rollout.max_context": "max_model_len",
    "rollout.max_sequences": "max_num_seqs",
    "rollout.gpu_memory_utilization": "gpu_memory_utilization",
    "rollout.engine_tensor and the number of ranks": """tensor_parallel_size pipeline_parallel_size
        data_parallel_size prefill_context_parallel_size decode_context_parallel_size enable_expert_parallel
        nnodes node_rank master_addr master_port device_ids distributed_executor_backend worker_cls""",
    "the reshard, which writes the weights of model.path into vLLM's parameters": """load_format
        quantization quantization_config enable_sleep_mode cpu_offload_gb moe_backend""",
    "the records, which need the sampled tokens with the log-probs of the policy": """logprobs_mode
        skip_tokenizer_init generation_config override_generation_config logits_processors reasoning_parser
        speculative_config spec_method spec_model spec_tokens watermark watermark_config async_scheduling
        scheduler_cls return_sampling_mask enable_return_routed_experts""",
    "the program": "additional_config disable_log_stats",
}
DECIDED = {name: reason for reason, names in _FROM.items() for name in names.split()}


def check(config: Config) -> None:
    """Raise ConfigError for an option that is unknown, follows from another field, or has another type."""
    if config.rollout.vllm:
        known = passed_on.declared("vllm", ("engine/arg_utils.py", "EngineArgs"))
        passed_on.check("rollout.vllm", config.rollout.vllm, DECIDED, known, "vLLM's EngineArgs")
