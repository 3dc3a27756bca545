"""The fields of a run, which is one YAML file; checked without torch. config_file.py reads the file.

Every section belongs to the stage of the same name. `megatron:` is passed to megatron's TransformerConfig
unchanged.
"""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.messages import did_you_mean

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"  # no leading dot: ".." would leave the root


Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam: a decay rate


class ConfigError(ValueError):
    """An error that the user can fix: the message names field, value and remedy. The command line ends with
    exit code 2."""


def _finite(value: Any) -> Any:
    """Return `value`; raise if it is or contains an infinity or NaN. For fields without a declared type,
    which pydantic's allow_inf_nan does not check."""
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("finite_number", "Input should be a finite number")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(part)
    return value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field("run", pattern=NAME, description="the run's folder under `root`")
    root: Path = Field(Path("runs"), description="folder of all runs")
    seed: int = Field(0, ge=0, lt=2**32, description="of data order, sampling and initial values")
    iterations: int = Field(
        100, ge=1, description="iterations of rollout, score, advantage, update and reshard"
    )
    evaluate_every: int = Field(
        0, ge=0, description="iterations between evaluations; 0: only by the evaluate command"
    )
    checkpoint_every: int = Field(10, ge=1, description="iterations between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_every: int = Field(
        0, ge=0, description="checkpoints of iterations that this divides are never removed; 0: none"
    )
    async_checkpoints: bool = Field(
        True, description="write from a copy in host memory while training goes on; False: wait for the disk"
    )
    end_margin: float = Field(
        300, ge=0, description="seconds that a checkpoint may take before SLURM_JOB_END_TIME"
    )
    nonfinite_budget: int = Field(
        5, ge=0, description="skipped non-finite steps before the run ends with exit code 93"
    )
    dump: Literal["none", "faults", "all"] = Field(
        "faults", description="iterations whose scored batch goes to dumps/: none, those with a fault, all"
    )
    keep_dumps: int = Field(4, ge=1, description="newest dumps kept")
    spike_deviations: float = Field(
        10.0, gt=0, description="robust deviations above the median that make a number of an update a spike"
    )
    spike_window: int = Field(
        32, ge=4, description="iterations that the median is of; judged from half as many on"
    )
    rollback: bool = Field(
        False,
        description="after a spike, go on with the newest checkpoint and the tasks that come next; once per "
        "checkpoint",
    )

    @property
    def folder(self) -> Path:
        return self.root / self.name


class DeadlinesConfig(Section):
    """Seconds that a phase may take. A rank that exceeds one reports the stacks of its threads and the rank
    that the others wait for, and ends the run with exit code 1."""

    start_up: float = Field(3600.0, gt=0, description="until the first rollout or evaluation begins")
    rollout: float = Field(3600.0, gt=0, description="waiting for tools (environment.tool_wait) is added")
    score: float = Field(3600.0, gt=0, description="log-probs and values")
    advantage: float = Field(600.0, gt=0, description="credit to tokens")
    update: float = Field(7200.0, gt=0, description="all optimizer steps of an iteration")
    reshard: float = Field(1800.0, gt=0, description="weights to the engine")
    evaluate: float = Field(7200.0, gt=0, description="one evaluation")
    checkpoint: float = Field(3600.0, gt=0, description="one checkpoint, or the wait for the last one")
    other: float = Field(600.0, gt=0, description="between two phases: metrics and logs are written there")


class ModelConfig(Section):
    path: Path = Field(
        description="Hugging Face checkpoint folder: config.json, tokenizer.json, *.safetensors"
    )
    critic_path: Path | None = Field(None, description="where the critic's trunk starts from; default: path")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: float32 on CPU, bfloat16 on GPU"
    )
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="auto: TransformerEngine's where it is installed and there is a GPU"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="activations computed again in the backward pass: none, attention only, or every layer",
    )


class ParallelConfig(Section):
    """Axes of the device mesh; data parallelism takes the remaining ranks."""

    tensor: int = Field(1, ge=1, description="ranks that split every matrix of a layer")
    sequence: bool = Field(False, description="sequence parallelism; needs tensor > 1")
    context: int = Field(1, ge=1, description="ranks that share the tokens of every trajectory")
    expert: int = Field(
        1, ge=1, description="ranks that share a layer's experts; divides the data and context ranks"
    )
    pipeline: int = Field(1, ge=1, description="ranks that split the layers into stages")
    virtual: int = Field(1, ge=1, description="model chunks per pipeline rank (interleaved schedule)")
    first_stage_layers: int | None = Field(None, ge=1, description="default: as many as the others")
    last_stage_layers: int | None = Field(None, ge=1, description="default: as many as the others")


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0, description="highest learning rate of Adam")
    warmup_fraction: float = Field(
        0.0, ge=0, le=1, description="share of all updates over which lr rises linearly from 0"
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay rates of Adam's two moments")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    distributed: bool = Field(
        True, description="megatron's distributed optimizer (states sharded over data parallel)"
    )


class ActorOptimizerConfig(OptimizerConfig):
    lr: float = Field(1e-6, gt=0, description="highest learning rate of Adam")
    warmup_fraction: float = Field(
        0.285, ge=0, le=1, description="share of all updates over which lr rises linearly from 0"
    )


class CriticOptimizerConfig(OptimizerConfig):
    lr: float = Field(1e-5, gt=0, description="highest learning rate of Adam")
    warmup_fraction: float = Field(
        0.015, ge=0, le=1, description="share of all updates over which lr rises linearly from 0"
    )


class DataConfig(Section):
    train: Path | None = Field(None, description="tasks, .jsonl or .parquet in the verl schema")
    evaluate: Path | None = Field(None, description="held-out tasks, in the same formats")
    demonstrations: Path | None = Field(
        None, description="scripted trajectories for the cold-start command, .jsonl"
    )


class RetrievalConfig(Section):
    kind: Literal["bm25", "http"] = Field("bm25", description="bm25: an index in the process; http: a server")
    index: Path | None = Field(None, description="bm25: a folder that build-index wrote")
    url: str | None = Field(None, description="http: a /retrieve endpoint")
    topk: int = Field(3, ge=1, le=100, description="documents per query")
    timeout: float = Field(10.0, gt=0, description="seconds per request")
    retries: int = Field(3, ge=0, description="further attempts of a request that failed")
    token_env: str | None = Field(
        None, description="name of the environment variable that holds the bearer token"
    )

    @model_validator(mode="after")
    def _no_secret(self) -> RetrievalConfig:
        if self.url is not None and "@" in self.url.rpartition("://")[2].partition("/")[0]:
            raise ValueError(
                "url holds a user or password, and a run's folder keeps its configuration; name the "
                "variable that holds a token in token_env instead"
            )
        return self


class EnvironmentConfig(Section):
    kind: str = Field(
        "search", min_length=1, description="search, or MODULE:FACTORY of your own on PYTHONPATH"
    )
    max_turns: int = Field(4, ge=1, description="turns per episode")
    max_observation_tokens: int = Field(500, ge=1, description="tokens kept of an environment's answer")
    deadline: float = Field(30.0, gt=0, description="seconds an environment call may take")
    tool_wait: float = Field(
        600.0,
        ge=0,
        description="seconds that a rollout waits for tools that answer nobody; then the run checkpoints and "
        "ends with exit code 85",
    )
    concurrency: int = Field(64, ge=1, description="environment calls in flight per engine group")
    max_failure_rate: float = Field(
        0.2,
        ge=0,
        le=1,
        description="share of episodes that may fail (error, timeout), of all of a rollout and of those that "
        "called a tool; above it the run ends",
    )
    retrieval: RetrievalConfig = RetrievalConfig()


class RolloutConfig(Section):
    tasks_per_iteration: int = Field(64, ge=1, description="tasks drawn per iteration, over all replicas")
    samples_per_task: int = Field(
        1, ge=1, description="episodes per task; group-normalised presets need more than 1"
    )
    engine_tensor: int | None = Field(
        None, ge=1, description="tensor parallel size of the engine; default: parallel.tensor"
    )
    temperature: float = Field(1.0, gt=0, description="of sampling")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling: probability mass that is kept")
    max_turn_tokens: int = Field(500, ge=1, description="tokens per turn")
    max_prompt_tokens: int = Field(2048, ge=1, description="longer prompts are not played")
    max_context: int | None = Field(
        None,
        ge=2,
        description="tokens of a whole trajectory; default: max_prompt_tokens + (max_turns + 1) * "
        "(max_turn_tokens + max_observation_tokens)",
    )
    max_sequences: int = Field(256, ge=1, description="sequences decoded together")
    kv_cache_gib: float = Field(1.0, gt=0, description="key-value cache per rank on CPU")
    gpu_memory_utilization: float = Field(
        0.6, gt=0, lt=1, description="share of a GPU's memory that the engine may use"
    )
    overlap_tools: bool = Field(
        True,
        description="keep generating while tools answer; False: wait, which makes a run repeatable bitwise",
    )
    engine_restarts: int = Field(
        3, ge=0, description="failures of vLLM in a run that a new engine answers; the next one ends it"
    )
    max_mismatch: float = Field(
        0.1, gt=0, description="mean |trainer - engine| log-prob, nats, that ends the run"
    )


class UpdateConfig(Section):
    epochs: int = Field(1, ge=1, description="passes over the trajectories of an iteration")
    minibatches: int = Field(2, ge=1, description="minibatches per epoch; each is one optimizer step")
    tokens_per_microbatch: int = Field(16384, ge=1, description="on one rank; a longer trajectory takes more")
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="what waits on the host while the engine serves: optimizer states and gradients; "
        "all: weights too, whenever nobody reads them",
    )
    logit_rows: int = Field(
        4096, ge=1, description="rows of logits that exist at a time; a longer turn takes more"
    )
    actor: ActorOptimizerConfig = ActorOptimizerConfig()
    critic: CriticOptimizerConfig = CriticOptimizerConfig()


class AlgorithmConfig(Section):
    """`preset` names a row of VARIANTS (algorithm/variants.py); a field that is given overrides the row."""

    preset: str = Field(
        "st_ppo", description="row of the table of algorithms; fields beside it override the row"
    )
    segments: Literal["token", "turn", "sequence"] = Field(
        "turn", description="tokens that share an importance ratio"
    )
    pooling: Literal["mean", "sum"] = Field("mean", description="how a segment's log-ratios are combined")
    clip_low: float = Field(
        0.2, ge=0, lt=1, description="ratios below 1 - clip_low are clipped where the advantage is negative"
    )
    clip_high: float = Field(
        0.2, ge=0, description="ratios above 1 + clip_high are clipped where the advantage is positive"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="largest ratio where the advantage is negative; null: none"
    )
    aggregation: Literal[
        "token_mean",
        "turn_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
    ] = Field("token_mean", description="weights of the tokens in the loss")
    aggregation_length: int | None = Field(
        None, ge=1, description="the constant that sequence_mean_token_sum_norm divides by, tokens"
    )
    correction: Literal["off", "coefficient", "logit", "gradient"] = Field(
        "logit", description="estimator of ||C||, the norm of the gradient that clipping removes"
    )
    correction_apply: Literal["gradient", "step"] = Field(
        "step", description="what the scale multiplies: the gradient, or the step's learning rate"
    )
    correction_unit: Literal["mean", "sum", "relative"] = Field(
        "relative",
        description="||C|| of the loss, a mean; of the sum over the minibatch's action tokens, which grows "
        "with their number; or as a multiple of the norm of the gradient that is left",
    )
    correction_strength: float = Field(
        10.0, gt=0, description="how many times ||C|| counts, in its unit; the paper: once"
    )
    correction_floor: float = Field(
        1.0, ge=0, description="scale = 1 / max(floor, strength ||C||); 0 is the paper's literal form"
    )
    correction_probe: bool = Field(
        False,
        description="also report ||C|| by every estimator, and every step in steps.jsonl; the same training, "
        "but for the time of a second backward pass where something is clipped",
    )
    advantage: Literal["gae", "group", "group_mean"] = Field(
        "gae",
        description="by a critic; or outcomes less their group's mean, divided by its deviation or not",
    )
    gae_level: Literal["token", "turn"] = Field("token", description="steps of GAE")
    gae_observations: bool = Field(
        False, description="True: GAE and value loss take observations in too, as the search baseline's do"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per step of GAE")
    lam: float = Field(1.0, ge=0, le=1, description="lambda of GAE")
    whiten: bool = Field(True, description="advantages to mean 0 and variance 1 over the batch")
    value_clip: float = Field(0.5, gt=0, description="range around the old value, as in PPO")
    kl_coefficient: float = Field(
        0.001, ge=0, description="weight of the KL divergence from the reference; 0 builds no reference"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="estimator of the KL divergence")
    kl_in: Literal["reward", "loss"] = Field(
        "reward", description="whether it is subtracted from rewards or added to the loss"
    )
    entropy_coefficient: float = Field(0.001, ge=0, description="weight of the entropy bonus")
    mismatch: Literal["off", "truncate", "mask"] = Field(
        "off", description="weight for train/serve mismatch: TIS, MIS or none"
    )
    mismatch_level: Literal["token", "turn", "sequence"] = Field(
        "token", description="tokens that the mismatch weight is averaged over"
    )
    mismatch_bound: float = Field(2.0, gt=1, description="bound of the mismatch weight")
    routing_replay: Literal["off", "old_policy"] = Field(
        "off",
        description="experts that an update uses: its own router's, or those of the old policy's scores",
    )

    @model_validator(mode="before")
    @classmethod
    def _row(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", "st_ppo")
        if preset not in VARIANTS:
            remedy = did_you_mean(str(preset), VARIANTS, "'{}'") or f"choose from {sorted(VARIANTS)}"
            raise ValueError(f"preset={preset!r} is not known; {remedy}")
        return {**VARIANTS[preset], **given}

    @model_validator(mode="after")
    def _length_given(self) -> AlgorithmConfig:
        if (self.aggregation == "sequence_mean_token_sum_norm") != (self.aggregation_length is not None):
            raise ValueError(
                f"aggregation_length={self.aggregation_length} with aggregation={self.aggregation!r}; "
                "sequence_mean_token_sum_norm needs it, such as the most tokens an episode may write, the "
                "others do not take it"
            )
        return self

    @model_validator(mode="after")
    def _observations_have_values(self) -> AlgorithmConfig:
        if self.gae_observations and (self.advantage != "gae" or self.gae_level != "token"):
            raise ValueError(
                f"gae_observations=True with advantage={self.advantage!r} and gae_level={self.gae_level!r}; "
                "only token-level GAE runs over observations, choose 'gae' and 'token'"
            )
        return self

    @model_validator(mode="after")
    def _kl_has_a_gradient(self) -> AlgorithmConfig:
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coefficient > 0:
            raise ValueError(
                "kl_estimator='k1' has no expected gradient as a loss; choose k2 or k3, or kl_in=reward"
            )
        return self


class EvaluateConfig(Section):
    tasks: int | None = Field(None, ge=1, description="a fixed sample of so many tasks; default: all")
    samples: int = Field(1, ge=1, description="episodes per task; the result is their mean")
    temperature: float = Field(0.0, ge=0, description="0: greedy")


class ColdStartConfig(Section):
    tokens: int | None = Field(None, ge=1, description="stop after so many tokens of the file; default: all")
    batch_tokens: int = Field(16384, ge=1, description="tokens per optimizer step over all ranks")
    lr: float = Field(1e-3, gt=0, description="highest learning rate of Adam; a cosine decays it to a tenth")
    warmup_fraction: float = Field(
        0.05, ge=0, le=1, description="share of the steps over which lr rises linearly from 0"
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    context_weight: float = Field(
        1.0,
        ge=0,
        description="weight of prompts and observations in the loss; the model's own turns have weight 1",
    )
    output: Path | None = Field(None, description="Hugging Face folder the trained model is written to")


class TelemetryConfig(Section):
    """Reporters in addition to metrics.jsonl and tensorboard/, which every run writes."""

    wandb_project: str | None = Field(
        None, description="Weights & Biases project; default: none. WANDB_API_KEY holds the key"
    )
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="offline: kept in the run's folder for `wandb sync`"
    )
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="the last row's numbers on http://127.0.0.1:PORT/metrics"
    )
    profile: tuple[int, int] | None = Field(
        None, description="first and last iteration of rank 0's torch.profiler trace, in profile/"
    )
    nvtx: bool = Field(False, description="an NVTX range per phase, for Nsight Systems")

    @model_validator(mode="after")
    def _window(self) -> TelemetryConfig:
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(
                f"profile={list(self.profile)} is no window; give [first, last] with 1 <= first <= last"
            )
        return self


class Config(Section):
    run: RunConfig = RunConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    update: UpdateConfig = UpdateConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    cold_start: ColdStartConfig = ColdStartConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    megatron: dict[str, Annotated[Any, AfterValidator(_finite)]] = Field(
        default_factory=dict, description="fields of megatron's TransformerConfig, verbatim"
    )

    @property
    def max_context(self) -> int:
        """Return the largest number of tokens of a trajectory."""
        r, e = self.rollout, self.environment
        return r.max_context or r.max_prompt_tokens + (e.max_turns + 1) * (
            r.max_turn_tokens + e.max_observation_tokens
        )

    @property
    def deadline_by_phase(self) -> dict[str, float]:
        """Seconds. Where tools are played with that can be away, waiting for them is added; an embedded index
        cannot."""
        e = self.environment
        wait = 0.0 if e.kind == "search" and e.retrieval.kind == "bm25" else e.tool_wait
        plays = dict.fromkeys(("start_up", "rollout", "evaluate"), wait)
        return {name: limit + plays.get(name, 0.0) for name, limit in self.deadlines.model_dump().items()}

    @property
    def timeout(self) -> timedelta:
        """Timeout of the process groups; longer than every phase's deadline, so that the deadline reports
        first which rank is late."""
        return timedelta(seconds=max(self.deadline_by_phase.values()) + 60)

    @property
    def engine_tensor(self) -> int:
        return self.rollout.engine_tensor or self.parallel.tensor

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_coefficient > 0

    def dump(self) -> str:
        """Return the resolved configuration as YAML; loading it gives an equal Config."""
        return yaml.safe_dump(json.loads(self.model_dump_json()), sort_keys=False)
