"""The end of a replica: what it sends to the trainer, and the exit code of its process."""

from __future__ import annotations

from megatron_stppo.config import ConfigError
from megatron_stppo.messages import one_line
from megatron_stppo.replicas.replica.news import End, Send
from megatron_stppo.replicas.replica.replica import Replica
from megatron_stppo.replicas.wire.messages import FromReplica, Leaving, ReplicaFailed
from megatron_stppo.resilience.faults import CannotServe


def play_to_the_end(replica: Replica, send: Send) -> End:
    """Run the replica, and return why it ended. Collective.

    The reason is also sent to the trainer, unless the trainer decided it or is gone.

    Exceptions of Replica.run are sent too, and passed on.
    """
    try:
        end = replica.run()
    except ConfigError as error:
        send(ReplicaFailed("misuse", str(error)))
        raise
    except Exception as error:
        said = str(error) if isinstance(error, CannotServe) else f"{type(error).__name__}: {error}"
        send(ReplicaFailed("error", one_line(said)))
        raise
    if (message := _message(end)) is not None:
        send(message)
    return end


def raise_failure(end: End) -> None:
    """Raise the error with which the process ends; nothing if it was asked to end."""
    if end.kind == "refused":
        raise ConfigError(end.text)
    if end.kind not in ("stop", "left"):
        raise CannotServe(end.text)


def _message(end: End) -> FromReplica | None:
    match end.kind:
        case "left":
            return Leaving(end.text)
        case "away" | "error":
            return ReplicaFailed(end.kind, end.text)
    return None
