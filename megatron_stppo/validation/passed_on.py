"""Check the sections whose fields go to another package, without importing it: `megatron:` goes to megatron's
TransformerConfig, `rollout.vllm:` to vLLM's EngineArgs."""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.section import Rule, enforce

PLAIN = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}
TRANSFORMER_CONFIG = (
    "megatron.core",
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
)
ENGINE_ARGS = ("vllm", ("engine/arg_utils.py", "EngineArgs"))


def _by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return {name: reason} of {reason: names}."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


# Fields of megatron that would change what is trained.
REFUSED = _by_name(
    {
        "importance ratios need the same network twice": "attention_dropout hidden_dropout",
        "megatron multiplies it by the tokens of a microbatch, and no gradient is divided by them here": """
            moe_aux_loss_coeff moe_z_loss_coeff""",
        "model/experts.py decides the order of the experts' tokens": """
            moe_permute_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization""",
    }
)
# Fields of megatron that follow from other fields of the configuration. Another value would train a different
# network or scale its gradient, not always with an error.
DECIDED_MEGATRON = _by_name(
    {
        "parallel.tensor": "tensor_model_parallel_size expert_tensor_parallel_size",
        "parallel.sequence": "sequence_parallel",
        "parallel.context": "context_parallel_size",
        "parallel.expert": "expert_model_parallel_size",
        "parallel.pipeline": "pipeline_model_parallel_size pipeline_model_parallel_layout",
        "parallel.virtual": "virtual_pipeline_model_parallel_size variable_seq_lengths",
        "parallel.first_stage_layers": "num_layers_in_first_pipeline_stage",
        "parallel.last_stage_layers": "num_layers_in_last_pipeline_stage",
        "model.dtype": "params_dtype pipeline_dtype bf16 fp16",
        "the losses, which have their own denominators": "calculate_per_token_loss",
        "the order of the experts' tokens, which needs alltoall": "moe_token_dispatcher_type",
        "the losses, of which only the policy gradient trains the router": "moe_router_load_balancing_type",
        "the importance ratios, which need the same network twice": """
            moe_input_jitter_eps moe_expert_capacity_factor moe_router_force_load_balancing""",
        "the architecture, which config.json in model.path determines": """
            num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
            add_bias_linear add_qkv_bias qk_layernorm qk_l2_norm normalization layernorm_epsilon
            layernorm_zero_centered_gamma apply_residual_connection_post_layernorm rotary_interleaved
            gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset softmax_scale
            softmax_type window_size window_attn_skip_freq attention_output_gate multi_latent_attention
            experimental_attention_variant linear_attention_freq no_rope_freq mrope_section is_hybrid_model
            mtp_num_layers heterogeneous_block_specs num_moe_experts moe_layer_freq moe_ffn_hidden_size
            moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
            moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk
            moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function
            moe_router_enable_expert_bias moe_apply_probs_on_input""",
    }
)
# Of megatron's AttnBackend, without "local", with which TransformerEngine's layers have no backend.
ATTENTION_BACKENDS = ("flash", "fused", "unfused", "auto")
# Options of vLLM that follow from other fields. With other values of some of them, trainer and engine would
# not compute the same policy, or the records would lack tokens.
DECIDED_VLLM = _by_name(
    {
        "model.path": """
            model tokenizer hf_config_path model_weights revision code_revision tokenizer_revision
            tokenizer_mode trust_remote_code hf_overrides served_model_name model_impl runner convert""",
        "model.dtype": "dtype",
        "model.lora": "enable_lora max_loras max_lora_rank lora_dtype max_cpu_loras",
        "run.seed": "seed",
        "deadlines": "distributed_timeout_seconds cpu_distributed_timeout_seconds",
        "rollout.max_context": "max_model_len",
        "rollout.max_sequences": "max_num_seqs",
        "rollout.gpu_memory_utilization": "gpu_memory_utilization",
        "rollout.engine_tensor and the number of ranks": """
            tensor_parallel_size pipeline_parallel_size data_parallel_size prefill_context_parallel_size
            decode_context_parallel_size enable_expert_parallel nnodes node_rank master_addr master_port
            device_ids distributed_executor_backend worker_cls""",
        "the reshard, which writes the weights of model.path into vLLM's parameters": """
            load_format quantization quantization_config enable_sleep_mode cpu_offload_gb moe_backend""",
        "the records, which need the sampled tokens with the log-probs of the policy": """
            logprobs_mode skip_tokenizer_init generation_config override_generation_config logits_processors
            reasoning_parser speculative_config spec_method spec_model spec_tokens watermark
            watermark_config async_scheduling scheduler_cls return_sampling_mask
            enable_return_routed_experts""",
        "the program": "additional_config disable_log_stats",
    }
)


def check_megatron(config: Config) -> None:
    """Raise ConfigError for a field that does not exist, follows from another field, or changes what is
    trained."""
    enforce(_megatron(config))
    known = declared(*TRANSFORMER_CONFIG)
    _check("megatron", config.megatron, DECIDED_MEGATRON, known, "megatron's TransformerConfig")


def check_vllm(config: Config) -> None:
    """Raise ConfigError for an option that is unknown, follows from another field, or has another type."""
    if config.rollout.vllm:
        known = declared(*ENGINE_ARGS)
        _check("rollout.vllm", config.rollout.vllm, DECIDED_VLLM, known, "vLLM's EngineArgs")


def _megatron(config: Config) -> Iterator[Rule]:
    fields, replay = config.megatron, config.algorithm.routing_replay
    for name, reason in REFUSED.items():
        problem = f"megatron.{name}={fields.get(name)}: {reason}"
        yield Rule(bool(fields.get(name)), problem, "leave it out, or set it to 0")
    yield Rule(
        bool(fields.get("moe_router_fusion")) and replay != "off",
        "megatron.moe_router_fusion=True: the fused router cannot replay experts "
        f"(algorithm.routing_replay={replay})",
        "leave it out, or set algorithm.routing_replay=off",
    )
    backend = fields.get("attention_backend", "auto")
    yield Rule(
        backend not in ATTENTION_BACKENDS,
        f"megatron.attention_backend={backend!r}: not a backend of TransformerEngine's attention",
        f"choose one of {', '.join(ATTENTION_BACKENDS)}",
    )


def _check(
    section: str, fields: Mapping[str, Any], decided: Mapping[str, str], known: Mapping[str, str], owner: str
) -> None:
    """Raise ConfigError for an option that does not exist, that follows from something else, or that has
    another type than `owner` declares.

    decided: {option: what it follows from}. known: {option: its type, as Python writes it}; only types that
    are made of those in PLAIN are compared.
    """
    for name, value in fields.items():
        if name in decided:
            raise ConfigError(f"{section}.{name}={value}: follows from {decided[name]}; leave it out")
        if name not in known:
            remedy = did_you_mean(name, known, section + ".{}") or f"see {owner}"
            raise ConfigError(f"{section}.{name}={value!r}: no such field; {remedy}")
        kinds = [kind.strip() for kind in known[name].split("|")]
        if not set(kinds) <= PLAIN.keys():
            continue
        allowed = tuple(python for kind in kinds for python in PLAIN[kind])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ConfigError(
                f"{section}.{name}={value!r}: {owner} declares {known[name]}; give one of these"
            )


@functools.cache
def declared(package: str, *classes: tuple[str, str]) -> dict[str, str]:
    """Return {field: type} of dataclasses of an installed package, from its source: an import takes seconds.

    classes: (file in the package, class). Raises ConfigError if the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"{package} is not installed; install what tools/lock-cpu.txt lists")
    root, fields = Path(spec.origin).parent, dict[str, str]()
    for file, owner in classes:
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                of = (part for part in node.body if isinstance(part, ast.AnnAssign))
                fields |= {ast.unparse(part.target): ast.unparse(part.annotation) for part in of}
    return fields
