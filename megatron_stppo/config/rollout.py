"""The sections `data`, `environment`, `rollout` and `evaluate`: the episodes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr

from megatron_stppo.config.section import Rule, Seconds, Section, finite


class DataConfig(Section):
    train: Path | None = None
    """tasks, .jsonl or .parquet in the verl schema"""
    evaluate: Path | None = None
    """held-out tasks, in the same formats"""
    demonstrations: Path | None = None
    """scripted trajectories for the cold-start command, .jsonl"""


class RetrievalConfig(Section):
    kind: Literal["bm25", "http"] = "bm25"
    """bm25: an index in the process; http: a server"""
    index: Path | None = None
    """bm25: a folder that build-index wrote"""
    url: str | None = None
    """http: a /retrieve endpoint"""
    topk: int = Field(3, ge=1, le=100)
    """documents per query"""
    timeout: Seconds = 10.0
    """seconds per request"""
    retries: int = Field(3, ge=0)
    """further attempts after a failed request"""
    token_env: str | None = None
    """environment variable that holds the bearer token"""

    def rules(self) -> Iterable[Rule]:
        host = (self.url or "").rpartition("://")[2].partition("/")[0]
        yield Rule(
            "@" in host,
            "url holds a user or password, and a run's folder keeps its configuration",
            "name the variable that holds a token in token_env instead",
        )


class EnvironmentConfig(Section):
    kind: str = Field("search", min_length=1)
    """search, agent, or MODULE:FACTORY, in the folder of the configuration file or on PYTHONPATH"""
    reward: str | None = Field(None, min_length=1)
    """MODULE:FUNCTION, found as `kind`, that computes the reward of an episode"""
    agent: str | None = Field(None, min_length=1)
    """agent: MODULE:FUNCTION, found as `kind`, `async def FUNCTION(episode)`, which returns the reward"""
    command: list[str] | None = Field(None, min_length=1)
    """agent: a program and its arguments instead; the last line of its output is the reward"""
    command_variables: list[str] = Field([])
    """agent: environment variables that the command gets besides PATH and a few more"""
    agents_address: str = Field("127.0.0.1", min_length=1)
    """agent: IP address or host name of this machine at which agents reach the policy, over plain HTTP"""
    tool_parser: str | None = None
    """agent: vLLM's parser of tool calls, such as hermes; needed for tools"""
    max_turns: int = Field(4, ge=1)
    """turns per episode; search: one more, which must answer; agent: completions"""
    max_observation_tokens: int = Field(500, ge=1)
    """tokens kept of an observation"""
    after_end: Literal["message", "text"] = "message"
    """an observation of an environment without stop strings, or after an end-of-text token. message: a new
    message of the user of the template; text: inside the assistant's, as in Search-R1"""
    deadline: Seconds = 30.0
    """seconds that a call of an environment may take"""
    tool_wait: float = Field(600.0, ge=0, le=10_000_000)
    """seconds to wait for unavailable tools; then the run ends with a checkpoint and code 85"""
    concurrency: int = Field(64, ge=1)
    """environment calls in progress at a time, per engine"""
    max_failure_rate: float = Field(0.2, ge=0, le=1)
    """share of failed episodes, of all or of tool users, above which the run ends"""
    retrieval: RetrievalConfig = RetrievalConfig()
    _modules: Path | None = PrivateAttr(None)  # no field: a file must not name a folder of code

    @property
    def modules(self) -> Path | None:
        """The folder of the configuration file, with modules that may be named here. See Config.beside."""
        return self._modules

    def beside(self, folder: Path) -> Self:
        """Return a copy with this folder as `modules`."""
        copy = self.model_copy()
        copy._modules = folder
        return copy

    def rules(self) -> Iterable[Rule]:
        is_agent, given = self.kind == "agent", [n for n in ("agent", "command") if getattr(self, n)]
        yield Rule(
            is_agent and len(given) != 1,
            f"kind=agent needs either agent or command, and {len(given)} of them are set",
            "give one of them",
        )
        yield Rule(
            is_agent and self.reward is not None,
            "reward is set with kind=agent, which returns its reward",
            "remove reward",
        )
        for name in given:
            yield Rule(
                not is_agent, f"{name} is set with kind={self.kind}", f"set kind=agent, or remove {name}"
            )


class RolloutConfig(Section):
    tasks_per_iteration: int = Field(64, ge=1)
    """tasks drawn per iteration, over all replicas"""
    samples_per_task: int = Field(1, ge=1)
    """episodes per task; group advantages need more than 1"""
    resample: int = Field(0, ge=0)
    """rounds in which groups of equal rewards are replaced (docs/algorithms.md)"""
    engine_tensor: int | None = Field(None, ge=1)
    """tensor parallel size of the engine; default: parallel.tensor"""
    temperature: float = Field(1.0, ge=0.01)
    """sampling temperature; vLLM's smallest is 0.01"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling: probability mass that is kept"""
    max_turn_tokens: int = Field(500, ge=1)
    """tokens per turn"""
    max_prompt_tokens: int = Field(2048, ge=1)
    """tasks with longer prompts are left out"""
    max_context: int | None = Field(None, ge=2)
    """tokens of a whole trajectory; default: max_prompt_tokens + (max_turns + 1) * (max_turn_tokens +
    max_observation_tokens)"""
    max_sequences: int = Field(256, ge=1)
    """sequences decoded together"""
    kv_cache_gib: float = Field(1.0, gt=0)
    """key-value cache per rank on a CPU"""
    gpu_memory_utilization: float = Field(0.6, gt=0, lt=1)
    """share of a GPU's memory for the engine"""
    overlap_tools: bool = True
    """generate while tools are called; false: wait for them, which makes runs bitwise repeatable"""
    engine_restarts: int = Field(3, ge=0)
    """failed engines that a run replaces before it ends. On a GPU with more than 0, the first ends the
    process with a checkpoint and exit code 85"""
    max_mismatch: float = Field(0.1, gt=0)
    """largest mean |trainer - engine| of log-probs of the current version, in nats; above it, plus
    -log(top_p), the run ends"""
    vllm: dict[str, Annotated[Any, AfterValidator(finite)]] = Field(default_factory=dict)
    """further arguments of vLLM's EngineArgs, verbatim; those that other fields determine are refused"""

    @property
    def episodes(self) -> int:
        """Episodes of an iteration."""
        return self.tasks_per_iteration * self.samples_per_task


class EvaluateConfig(Section):
    tasks: int | None = Field(None, ge=1)
    """number of tasks, as a fixed sample; default: all"""
    samples: int = Field(1, ge=1)
    """episodes per task; the result is their mean"""
    temperature: float = Field(0.0, ge=0)
    """0: greedy"""
