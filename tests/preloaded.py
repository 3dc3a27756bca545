"""Imports of the process from which run_ranks forks its ranks: torch, the CPU platform and megatron."""

from megatron_stppo.launch import process

process.prepare(engine=False)

import megatron_stppo.update.actor_step  # noqa: E402  after prepare: it imports megatron
import megatron_stppo.update.critic_step  # noqa: E402, F401
