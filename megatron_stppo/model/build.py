"""Builds actor, critic and reference, each with the weights of its Hugging Face folder."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_stppo.config import Config, LoraConfig
from megatron_stppo.model import adapters, fusions
from megatron_stppo.model.experts import join_weights, use_dispatchers
from megatron_stppo.model.layers import layer_spec, layers_of
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.routing_replay import attach
from megatron_stppo.model.token_model import TokenModel, ValueHead, share
from megatron_stppo.parallel.collectives import refused_together
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_checkpoint import check_base, load_hf, load_peft
from megatron_stppo.weights.sharding.hf_files import head_of_critic
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.hf_write import type_of
from megatron_stppo.weights.sharding.low_rank import (
    Adaptation,
    LowRank,
    Scaled,
    adapter_shapes,
    adapter_spans,
    fill,
    low_rank_terms,
    scaled_terms,
)
from megatron_stppo.weights.sharding.parts import LayerSpec
from megatron_stppo.weights.sharding.spans import chunk_prefix, training_spans
from megatron_stppo.weights.sharding.tiles import Spans

VALUE_HEAD = ("output_layer.weight", "output_layer.bias")
Role = Literal["actor", "critic", "reference"]


def transformer_config(
    shape: ModelShape, config: Config, mesh: MeshRank, dtype: torch.dtype
) -> TransformerConfig:
    """Return megatron's configuration of a model of this shape.

    Fields under `megatron:` in the run's configuration override the values that are set here. Fields that
    would give another network have been refused (validation/passed_on.py).
    """
    on_cpu = not torch.cuda.is_available()
    recompute: dict[str, Any] = {}
    if config.model.recompute != "none":
        recompute["recompute_granularity"] = config.model.recompute
    if config.model.recompute == "full":
        recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "qk_layernorm": shape.qk_norm,
        "add_qkv_bias": shape.qkv_bias,
        # a checkpoint then has a tensor per layer; else one tensor has a weight of all layers
        "hetereogenous_dist_checkpoint": shape.recurrent_layers > 0,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": mesh.tensor_size,
        "pipeline_model_parallel_size": mesh.pipeline_size,
        "virtual_pipeline_model_parallel_size": mesh.layout.virtual if mesh.layout.virtual > 1 else None,
        "num_layers_in_first_pipeline_stage": mesh.layout.first_stage_layers,
        # With two stages the first one determines the last. Given both and virtual chunks, megatron divides
        # by the number of stages between them.
        "num_layers_in_last_pipeline_stage": None
        if mesh.pipeline_size == 2 and mesh.layout.first_stage_layers
        else mesh.layout.last_stage_layers,
        "context_parallel_size": mesh.context_size,
        "expert_model_parallel_size": mesh.layout.expert,
        "sequence_parallel": config.parallel.sequence,
        # Packs differ in length, so pipeline stages exchange shapes before tensors. An interleaved schedule
        # cannot: with two stages both neighbours of a stage are the same rank, and shapes would be mixed up.
        "variable_seq_lengths": mesh.layout.virtual == 1,
        "overlap_p2p_comm": mesh.layout.virtual > 1,
        "batch_p2p_comm": mesh.layout.virtual == 1,
        # Losses already contain their global denominators, so megatron must not divide them.
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",  # the default rejects variable lengths, even in dense models
        **_experts(shape, layer_spec(config)),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": on_cpu,
        **fusions.fields(fusions.Place.of(config, shape, not on_cpu), config.megatron),
        "bias_dropout_fusion": False,  # there is neither a bias nor dropout
        "masked_softmax_fusion": False,  # for attention that is not packed
        "persist_layer_norm": False,
        **recompute,
    }
    given = dict(config.megatron)
    if "attention_backend" in given:
        given["attention_backend"] = AttnBackend[given["attention_backend"]]
    return layers_of(shape, config, dtype).settings(fields | given)


def _experts(shape: ModelShape, spec: LayerSpec) -> dict[str, Any]:
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_pre_softmax": not shape.renormalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # only the policy gradient trains the router
        "moe_grouped_gemm": spec == "transformer_engine",
    }


def build(
    role: Role,
    shape: ModelShape,
    config: Config,
    mesh: MeshRank,
    dtype: torch.dtype,
    trunk: Sequence[TokenModel] | None = None,
) -> list[TokenModel]:
    """Return this rank's shard of one model, before its weights are loaded.

    The list has one entry per model chunk: several under an interleaved pipeline, otherwise one. The critic
    has untied embeddings and a scalar head. With adapters, only they and the scalar head are trained; the
    reference has none unless model.lora.path gives initial ones.
    trunk: the actor's chunks, whose frozen weights the model uses instead of its own.
    """
    layers, settings = layers_of(shape, config, dtype), transformer_config(shape, config, mesh, dtype)
    if trunk is not None:  # megatron then leaves the device to torch
        settings.use_cpu_initialization, settings.perform_initialization = True, False
    is_critic, chunks = role == "critic", mesh.layout.virtual
    models = []
    for chunk in range(chunks):
        number, last = (chunk if chunks > 1 else None), mesh.is_last_stage and chunk == chunks - 1
        with contextlib.nullcontext() if trunk is None else torch.device("meta"):
            model = TokenModel(
                mesh,
                layer_spec(config) == "local",
                settings,
                layers.block(settings, number),
                vocab_size=shape.padded_vocab(mesh.tensor_size),
                max_sequence_length=shape.max_positions,
                pre_process=mesh.pipeline_rank == chunk == 0,
                post_process=last,
                # a shared trunk already has the copies of tied weights that megatron would make equal
                share_embeddings_and_output_weights=shape.tied and not is_critic and trunk is None,
                position_embedding_type="rope",
                rotary_percent=shape.rotary_share,
                rotary_base=shape.rope_theta,  # type: ignore[arg-type]
                rope_scaling=shape.rope_factor is not None,
                rope_scaling_factor=shape.rope_factor or 1.0,
                vp_stage=number,
            )
        layers.finish(model)
        use_dispatchers(model)
        if last and is_critic:
            model.output_layer = torch.nn.Identity()
        if trunk is not None:
            share(model, trunk[chunk])
        if config.model.lora.rank:
            model.requires_grad_(False)
        if last and is_critic:
            model.output_layer = ValueHead(settings)
        if is_critic and config.update.critic.frozen_attention:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and ".self_attention." not in name)
        if _has_adapters(role, config.model.lora):
            _attach_adapters(model, chunk_prefix(chunks, chunk), role, shape, config, mesh)
        # megatron's Float16Module is not used: it would copy the output to float32, and the log-prob op
        # computes in float32 anyway.
        model = model.to(device=torch.cuda.current_device())
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(type_of(shape, name, dtype))
        join_weights(model)
        models.append(model.requires_grad_(False).eval() if role == "reference" else model)
    if role == "actor" and config.algorithm.routing_replay != "off":
        attach(models, mesh)
    return models


def _attach_adapters(
    chunk: TokenModel, prefix: str, role: Role, shape: ModelShape, config: Config, mesh: MeshRank
) -> None:
    """Add the adapters of model.lora: A has random values that are equal under every layout, B is zero.

    prefix: the chunk_prefix of the chunk.
    """
    lora, seed = config.model.lora, f"{config.run.seed} {role}"
    spans = adapters_of_rank(shape, config, mesh.layout, mesh.rank)
    own = {name.removeprefix(prefix): of for name, of in spans.items() if name.startswith(prefix)}
    shapes = adapter_shapes(shape, lora.rank, lora.names)
    adapters.attach(chunk, own, lora.rank, lora.scale)
    chunk.adaptation = Adaptation(lora.rank, lora.alpha, lora.names, config.model.path, shape)
    for name, adapter in adapters.adapters(chunk):
        fill(adapter.a, own[f"{name}.a"], lambda key: adapters.uniform(shapes[key], f"{seed} {key}"))


def _has_adapters(role: Role, lora: LoraConfig) -> bool:
    """Return whether the model of a role has adapters. The reference is the actor before its first update, so
    that it needs none if the adapters of the actor add 0 then."""
    assert lora.rank or lora.path is None, "config/peft_folder.py reads the rank of an adapter"
    return lora.rank > 0 and (role != "reference" or lora.path is not None)


def adapters_of_rank(shape: ModelShape, config: Config, layout: Layout, rank: int) -> Spans:
    """Return the spans of a rank's adapters, under the names of named_parameters; {} without adapters."""
    weights, lora = training_spans(shape, layout, rank, spec=layer_spec(config)), config.model.lora
    return adapter_spans(weights, lora.rank, shape.hidden, lora.names)


def adapter_terms(
    parameters: Mapping[str, Tensor], shape: ModelShape, config: Config, mesh: MeshRank, *, merged: bool
) -> Mapping[tuple[str, str], LowRank | Scaled]:
    """Return the terms with which a rank's rows are computed (weights/reshard/staging.py); {} without
    adapters.

    parameters: named_parameters of actor or critic. merged: whether weights are merged with their adapters,
    or each B with the scale.
    """
    lora = config.model.lora
    if not lora.rank:
        return {}
    weights = training_spans(shape, mesh.layout, mesh.rank, spec=layer_spec(config))
    if not merged:
        return scaled_terms(weights, lora.names, lora.scale)
    return low_rank_terms(parameters, weights, lora.rank, lora.names, lora.scale)


def named_parameters(model: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of this rank's chunks, under the names of weights/sharding/spans.py."""
    return {
        chunk_prefix(len(model), number) + name: parameter
        for number, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }


def trainer(
    role: Role,
    shape: ModelShape,
    config: Config,
    mesh: MeshRank,
    dtype: torch.dtype,
    trunk: Sequence[TokenModel] | None = None,
) -> Trainer:
    """Return the actor or critic, loaded from its Hugging Face folder, with gradients and optimizer.

    trunk: as for build().
    """
    settings = config.update.optimizer(role)
    model = from_hf(role, shape, config, mesh, dtype, trunk)
    updates = config.update.epochs * config.update.minibatches
    updates *= config.update.critic_steps if role == "critic" else 1
    return Trainer(data_parallel(model, settings.distributed), settings, config.run.iterations, updates)


def data_parallel(model: Sequence[TokenModel], distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """Wrap a trained model in megatron's data parallelism.

    The main gradients are float32. They are summed (not averaged) over the data and context parallel ranks.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(config=chunk.config, ddp_config=settings, module=chunk) for chunk in model
    ]


def from_hf(
    role: Role,
    shape: ModelShape,
    config: Config,
    mesh: MeshRank,
    dtype: torch.dtype,
    trunk: Sequence[TokenModel] | None = None,
) -> list[TokenModel]:
    """Return a model with the weights of its Hugging Face folder. This rank reads only its own rows.

    Collective.
    trunk: as for build(); only adapters are read then, those of model.lora.path.
    Raises ConfigError if the checkpoint does not match its config.json.
    """
    model, lora = build(role, shape, config, mesh, dtype, trunk), config.model.lora
    own = adapters_of_rank(shape, config, mesh.layout, mesh.rank) if _has_adapters(role, lora) else {}
    if lora.path is not None:
        digest = load_peft(lora.path, own, named_parameters(model))
        check_base(lora.path, config.model.path, shape)
        for chunk in model:
            chunk.adaptation = replace(chunk.adaptation, initial=digest) if chunk.adaptation else None
    if trunk is not None:
        return model
    folder = (config.model.critic_path or config.model.path) if role == "critic" else config.model.path
    last = chunk_prefix(len(model), len(model) - 1)
    keep = [last + name for name in VALUE_HEAD] if role == "critic" else []
    with refused_together():  # of a tensor, for instance, that only one rank reads
        head = head_of_critic(folder) if role == "critic" else "vocabulary"
        spans = training_spans(
            shape, mesh.layout, mesh.rank, spec=layer_spec(config), head=head, tied_copy=True
        )
        load_hf(folder, shape, spans, named_parameters(model), keep={*keep, *own} - spans.keys())
    return model
