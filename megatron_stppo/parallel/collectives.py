"""Exchange of small records, flags and failures between the ranks of a group, without pickle.

Bytes are sent as uint8 tensors, after their length. Records are sent as msgpack and decoded into the type
that the receiver gives, so that received data is never executed. `group=None` is the default group.
Every function that takes a group is a collective: all ranks of the group must call it, in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from megatron_stppo.base.errors import ConfigError

Failure = TypeVar("Failure")
Record = TypeVar("Record")
Group = dist.ProcessGroup | None


def gather_records(records: Sequence[Record], type: type[Record], group: Group = None) -> list[list[Record]]:
    """Return every rank's records, in rank order, on every rank.

    type: a frozen dataclass of numbers, strings, tuples and such dataclasses. A field annotated Any must hold
    a JSON value, and is returned as one: a tuple becomes a list.
    Raises msgspec.ValidationError if a rank sent another type.
    Example: [Message("user", "a")] on rank 0 and [] on rank 1 return [[Message("user", "a")], []].
    """
    payloads = all_gather_bytes(encode(list(records)), group)
    return [decode(payload, list[type]) for payload in payloads]  # type: ignore[valid-type]


def encode(value: Any) -> bytes:
    """Return a record as msgpack."""
    return msgspec.msgpack.encode(value)


def decode(payload: bytes, type: Any) -> Any:
    """Return the record in `payload`. Raises msgspec.MsgspecError if it is not of this type."""
    # strict=False would convert "1" to 1; the data must already have the type.
    return msgspec.msgpack.decode(payload, type=type, strict=True)


def broadcast_bytes(payload: bytes | None, source: int, group: Group = None) -> bytes:
    """Return the payload of group rank `source` on every rank. The other ranks' payloads are ignored.

    This is one broadcast of the length, and one of the payload unless it is empty.
    """
    device, root = _device(group), _global_rank(source, group)
    sender = dist.get_rank(group) == source
    assert payload is not None or not sender, "the source passes bytes"
    data = payload if sender and payload is not None else b""
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, root, group=group)
    if not int(length):
        return b""
    body = _to_tensor(data, device) if sender else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(body, root, group=group)
    return data if sender else _to_bytes(body)


def broadcast_record(record: Record | None, type: type[Record], source: int, group: Group = None) -> Record:
    """Return the record of group rank `source` on every rank. The other ranks' records are ignored.

    type: a frozen dataclass as in gather_records, whose fields all have default values. A record with these
    values only costs a single broadcast, of a length of 0.
    Raises msgspec.ValidationError if the source sent another type.
    """
    if record is not None and dist.get_world_size(group) == 1:
        return record
    body = broadcast_bytes(b"" if record is None or record == type() else encode(record), source, group)
    return decode(body, type) if body else type()


def all_gather_bytes(payload: bytes, group: Group = None) -> list[bytes]:
    """Return every rank's payload, in rank order. Lengths may differ; shorter payloads are sent padded."""
    sizes, padded = _padded(payload, group)
    if not len(padded):
        return [b""] * len(sizes)
    bodies = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(bodies, padded, group=group)
    return [_to_bytes(body[:size]) for body, size in zip(bodies, sizes, strict=True)]


def gather_bytes(payload: bytes, group: Group = None) -> list[bytes]:
    """Return every rank's payload, in rank order, on group rank 0, and an empty list on the others."""
    sizes, padded = _padded(payload, group)
    bodies = [torch.empty_like(padded) for _ in sizes] if dist.get_rank(group) == 0 else None
    dist.gather(padded, bodies, dst=_global_rank(0, group), group=group)
    return [_to_bytes(body[:size]) for body, size in zip(bodies or [], sizes, strict=False)]


def _padded(payload: bytes, group: Group) -> tuple[list[int], torch.Tensor]:
    """Return the length of every rank's payload, and this rank's as a tensor of the greatest length."""
    device = _device(group)
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = torch.cat(lengths).tolist()  # one wait for the device
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(payload)] = _to_tensor(payload, device)
    return sizes, padded


def send_to_first(payload: bytes) -> Iterator[bytes]:
    """Send every rank's payload to rank 0, where it is yielded; in rank order, and one at a time in memory.

    Collective. On other ranks the iterator is empty. Rank 0 must consume it before the next collective.
    """
    lengths = [size for (size,) in gather_records([len(payload)], int)]
    if dist.get_rank() == 0:
        return _received(payload, lengths)
    if payload:
        dist.send(_to_tensor(payload, torch.device("cpu")), 0)
    return iter(())


def _received(own: bytes, lengths: Sequence[int]) -> Iterator[bytes]:
    yield own
    for source, length in enumerate(lengths):
        if source and length:
            body = torch.empty(length, dtype=torch.uint8)
            dist.recv(body, source)
            yield _to_bytes(body)


def all_reduce_sum(tensor: torch.Tensor, group: Group = None, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the sum over ranks, as a new tensor on the device of `tensor`, which is not changed."""
    total = tensor.detach().clone().to(_device(group))
    dist.all_reduce(total, op=op, group=group)
    return total.to(tensor.device)


def all_reduce_max(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the maximum over ranks, as a new tensor on the device of `tensor`, which is not changed."""
    return all_reduce_sum(tensor, group, dist.ReduceOp.MAX)


def all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: Group = None) -> torch.Tensor:
    """Send the first sent[0] rows to rank 0, the next sent[1] rows to rank 1 and so on.

    Return the rows that this rank gets, in rank order, on the device of `rows`. received: how many each rank
    sends to this one.
    """
    given = rows.contiguous().to(_device(group))
    out = given.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, given, received, sent, group=group)
    return out.to(rows.device)


def any_rank(flag: bool, group: Group = None) -> bool:
    """Return True on every rank if any rank passes True, so that all ranks take the same decision."""
    return bool(all_reduce_max(torch.tensor([int(flag)], dtype=torch.int32, device=_device(group)), group))


def _device(group: Group) -> torch.device:
    """Return the device of the tensors to send: the GPU for NCCL, the host for every other backend."""
    nccl_only = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl_only else torch.device("cpu")


def _global_rank(group_rank: int, group: Group) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def _to_tensor(payload: bytes, device: torch.device) -> torch.Tensor:
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def _to_bytes(body: torch.Tensor) -> bytes:
    return body.cpu().numpy().tobytes()


def raise_together(
    own: Failure | None,
    exception: Callable[[dict[int, Failure]], BaseException],
    type: type[Failure],
    group: Group = None,
    *,
    cause: BaseException | None = None,
) -> None:
    """Raise exception({rank: failure}) on every rank if any rank passes a failure. Collective.

    A rank that raised alone would leave the others waiting in their next collective. So a rank catches its
    exception, and all ranks exchange a record of it, a string or a frozen dataclass. Without a failure this
    costs the all-reduce of one number.

    own: this rank's failure, or None. exception: makes the exception from the failures of all ranks that have
    one, in rank order. It may return `cause`, to raise this rank's own exception. type: the type of the
    failures. cause: this rank's own exception, which becomes the cause of the one that is raised.
    Example: if rank 1 of 2 passes "disk full" and `exception` is lambda failures: OSError(by_rank(failures)),
    both ranks raise OSError("rank 1: disk full").
    """
    if failures := gather_failures(own, type, group):
        error = exception(failures)
        raise error from (error.__cause__ if error is cause else cause)


@contextmanager
def refused_together(group: Group = None) -> Iterator[None]:
    """Raise ConfigError on every rank if any rank raises one in the block: the first of them. Collective."""
    misuse: str | None = None
    try:
        yield
    except ConfigError as error:
        misuse = str(error)
    raise_together(misuse, lambda found: ConfigError(first(found)), str, group)


def gather_failures(own: Failure | None, type: type[Failure], group: Group = None) -> dict[int, Failure]:
    """Return {rank: failure} of the ranks that pass one, in rank order, on every rank. Collective."""
    if not any_rank(own is not None, group):
        return {}
    gathered = gather_records([] if own is None else [own], type, group)
    return {rank: of_rank[0] for rank, of_rank in enumerate(gathered) if of_rank}


def by_rank(texts: Mapping[int, str]) -> str:
    """Return one line. Example: by_rank({0: "disk full", 2: "late"}) is "rank 0: disk full; rank 2: late"."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())


def first(texts: Mapping[int, str]) -> str:
    """Return the text of the first rank that has one. Example: first({1: "late", 2: "full"}) is "late"."""
    return next(iter(texts.values()))
