"""The connection file: only the user who owns the run can read it, and every attempt writes a new one."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.keys import Connection

CONNECTION = Connection("127.0.0.1", 41234, "5e" * 32)


@pytest.fixture
def listens() -> Iterator[Connection]:
    """A connection at which a program listens."""
    with socket.create_server(("127.0.0.1", 0)) as alive:
        yield replace(CONNECTION, port=alive.getsockname()[1])


def test_only_the_owner_can_read_the_file_and_open_its_folder_whatever_the_umask(
    tmp_path: Path, listens: Connection
) -> None:
    before = os.umask(0)
    try:
        keys.write(tmp_path, listens)
    finally:
        os.umask(before)
    assert mode(tmp_path / "serving") == 0o700 and mode(tmp_path / "serving" / "connection.json") == 0o600
    assert keys.find(tmp_path, 0.0) == listens


def test_a_file_that_an_attacker_prepared_under_the_scratch_name_is_not_written_to(
    tmp_path: Path, listens: Connection
) -> None:
    (tmp_path / "serving").mkdir(mode=0o777)
    readable = tmp_path / "readable"
    readable.write_text("")
    (tmp_path / "serving" / "connection.json.tmp").symlink_to(readable)
    keys.write(tmp_path, listens)
    assert readable.read_text() == "" and keys.find(tmp_path, 0.0) == listens
    assert mode(tmp_path / "serving") == 0o700


def test_a_replica_that_starts_first_waits_for_the_trainer(tmp_path: Path, listens: Connection) -> None:
    later, waits = threading.Timer(0.5, keys.write, (tmp_path, listens)), []
    later.start()
    assert keys.find(tmp_path, 10.0, lambda: waits.append(1)) == listens and waits == [1]
    later.join()


def test_the_file_of_a_killed_trainer_is_ignored_until_a_new_one_listens(
    tmp_path: Path, listens: Connection
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as killed:
        old = replace(CONNECTION, port=killed.getsockname()[1])
    keys.write(tmp_path, old)
    with pytest.raises(ConfigError, match="is of a trainer that has ended"):
        keys.find(tmp_path, 0.0)
    later = threading.Timer(0.1, keys.write, (tmp_path, listens))
    later.start()
    assert keys.find(tmp_path, 10.0) == listens
    later.join()


def test_a_connection_has_an_address_that_can_be_read() -> None:
    assert CONNECTION.address == "127.0.0.1:41234"
    assert replace(CONNECTION, host="fe80::1%eth0").address == "[fe80::1%eth0]:41234"


def test_without_a_trainer_the_error_names_the_file_and_the_command(tmp_path: Path) -> None:
    keys.write(tmp_path, CONNECTION)
    keys.remove(tmp_path)
    keys.remove(tmp_path)
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        keys.find(tmp_path, 0.1)
    assert time.monotonic() - began < 5
    assert str(error.value) == (
        f"{tmp_path}/serving/connection.json: does not exist after 0.1 s; start `megatron-stppo train` with "
        "serving.replicas for this run, or give the folder of another run"
    )


@pytest.mark.parametrize("open_to", [0o640, 0o604, 0o620, 0o660])
def test_a_file_that_other_users_can_open_is_refused(tmp_path: Path, open_to: int) -> None:
    keys.write(tmp_path, CONNECTION)
    keys.path_of(tmp_path).chmod(open_to)
    with pytest.raises(ConfigError, match=f"is {stat.filemode(stat.S_IFREG | open_to)} of user"):
        keys.find(tmp_path, 60.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    keys.write(tmp_path, CONNECTION)
    os.chown(keys.path_of(tmp_path), 4711, -1)
    with pytest.raises(
        ConfigError, match=r"is -rw------- of user 4711, and must be a file that only user 0, who"
    ):
        keys.find(tmp_path, 60.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"host":"127.0.0.1"}',
        msgspec.json.encode(replace(CONNECTION, host="/tmp/x")).decode(),
        msgspec.json.encode(replace(CONNECTION, key="short")).decode(),
        "x" * 10_000_000,
    ],
    ids=["empty", "list", "no fields", "one field", "no host", "short key", "long"],
)
def test_a_damaged_file_is_an_error_of_one_line(tmp_path: Path, text: str) -> None:
    keys.write(tmp_path, CONNECTION)
    keys.path_of(tmp_path).write_text(text)
    with pytest.raises(ConfigError, match="is not a connection file") as error:
        keys.find(tmp_path, 60.0)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_pipe_a_folder_or_a_link_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    for place in (os.mkfifo, os.mkdir, lambda path: os.symlink(__file__, path)):
        keys.write(tmp_path, CONNECTION)
        keys.remove(tmp_path)
        place(keys.path_of(tmp_path))
        with pytest.raises(ConfigError, match=r"and must be a file that only|not a link"):
            keys.find(tmp_path, 60.0)
        os.rename(keys.path_of(tmp_path), tmp_path / "serving" / f"old-{place}".replace("/", ""))


def test_the_key_is_not_in_a_printed_connection() -> None:
    assert "5e5e" not in repr(CONNECTION) and "5e5e" not in str(CONNECTION)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
