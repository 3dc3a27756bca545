from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import offline_bundle
from tools.offline import fatbin

ENTRY_HEADER = 64


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    head = fatbin.ENTRY.pack(kind, 0x101, ENTRY_HEADER, len(payload), 0, 0, 0, 1, architecture)
    return head.ljust(ENTRY_HEADER, b"\7") + payload


def region(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return fatbin.REGION.pack(0xBA55ED50, 1, fatbin.REGION.size, len(body)) + body


def test_only_programs_of_the_architecture_stay() -> None:
    own, other = entry(fatbin.PROGRAM, 90, b"own" * 9), entry(fatbin.PROGRAM, 80, b"other" * 9)
    ptx = entry(fatbin.PTX, 80, b"ptx" * 9)
    library = b"code" + region(other, own, ptx) + b"data" + region(own)
    kept, removed = fatbin.without_other_architectures(library, 90)
    assert removed == len(b"other" * 9) + len(b"ptx" * 9)
    assert kept == library.replace(b"other" * 9, bytes(45)).replace(b"ptx" * 9, bytes(27))


@pytest.mark.parametrize(
    ("gpu", "stays"),
    [(90, b"ptx 80"), (89, b"for 86"), (86, b"for 86"), (80, b"for 80"), (75, b""), (120, b"ptx100")],
)
def test_what_stays_is_what_the_driver_would_choose(gpu: int, stays: bytes) -> None:
    payloads = {b"for 80": (fatbin.PROGRAM, 80), b"for 86": (fatbin.PROGRAM, 86), b"ptx 80": (fatbin.PTX, 80)}
    payloads[b"ptx100"] = fatbin.PTX, 100
    library = region(*(entry(*of, payload) for payload, of in payloads.items()))
    kept, _ = fatbin.without_other_architectures(library, gpu)
    assert [payload for payload in payloads if payload in kept] == ([stays] if stays else [])
    without, _ = fatbin.without_other_architectures(library, gpu, ptx=False)
    assert [p for p in payloads if p in without] == ([stays] if stays.startswith(b"for") else [])


def test_bytes_of_another_layout_stay_as_they_are() -> None:
    whole = region(entry(fatbin.PROGRAM, 80, b"other" * 9))
    for library in (whole[:-1], whole[:40], b"\x50\xed\x55\xba" * 5, region(b"\xff" * 100), b""):
        assert fatbin.without_other_architectures(library, 90) == (library, 0)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_library_of_nvcc_keeps_one_program_and_can_be_loaded(tmp_path: Path) -> None:
    source, built = tmp_path / "k.cu", tmp_path / "libk.so"
    source.write_text('__global__ void k(float* x) { *x = 1; }\nextern "C" int f() { return 7; }\n')
    archs = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("80", "90")]
    subprocess.run(
        ["nvcc", *archs, "-shared", "-Xcompiler", "-fPIC", source, "-o", built],
        check=True,
        capture_output=True,
    )
    before = list(fatbin.regions(built.read_bytes()))
    kept, removed = fatbin.without_other_architectures(built.read_bytes(), 90)
    pairs = [sorted(entries, key=lambda one: one.architecture) for entries in before]
    assert pairs and all([one.architecture for one in pair] == [80, 90] for pair in pairs)
    assert removed == sum(old.end - old.start for old, _ in pairs)
    for old, new in pairs:
        assert not any(kept[old.start : old.end])
        assert kept[new.start : new.end] == built.read_bytes()[new.start : new.end]
    built.write_bytes(kept)
    loaded = [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL('{built}').f())"]
    assert subprocess.run(loaded, capture_output=True, text=True, check=True).stdout == "7\n"


def test_what_the_machine_has_is_left_out_unless_it_is_older(tmp_path: Path) -> None:
    frozen = tmp_path / "present.txt"
    frozen.write_text("numpy==2.5.2\nPyYAML==6.0.1\ntorch==2.11.0+cu130\nown @ file:///x\n# note\n")
    lock = {"numpy": "2.3.5", "pyyaml": "6.0.3", "vllm": "0.26.0", "torch": "2.11.0"}
    found = dict(offline_bundle.missing(lock, offline_bundle.listed(frozen)))
    assert found == {"pyyaml": "6.0.3", "vllm": "0.26.0"}


def test_the_lock_names_a_tested_pair_of_vllm_and_torch() -> None:
    from megatron_stppo.cluster.launch.doctor import TESTED_ENGINES

    lock = offline_bundle.listed(offline_bundle.LOCK)
    assert offline_bundle.TORCH.startswith(TESTED_ENGINES[lock["vllm"]])


def bundle(folder: Path, part_mib: float) -> Path:
    """Write a bundle of one file of 3,000,000 bytes that cannot be compressed, for this Python and torch."""
    folder.mkdir()
    data = folder.parent / "packages"
    data.mkdir()
    block = bytes(range(256)) * 4
    (data / "weights.bin").write_bytes(b"".join(hash_of(n) for n in range(46_875)))
    (data / "__pycache__").mkdir()
    (data / "__pycache__" / "x.pyc").write_bytes(block)
    stream = offline_bundle.write_stream(folder, "packages", [data], part_mib)
    python = ".".join(platform.python_version_tuple()[:2])
    torch = importlib.metadata.version("torch").partition("+")[0]
    manifest = {"python": python, "torch": torch, "streams": {"packages": stream}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.copy(offline_bundle.ROOT / "tools/offline/unpack.py", folder)
    return folder


def hash_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(4), digest_size=64).digest()


def unpack(folder: Path, target: Path, *streams: str) -> tuple[int, str]:
    line = [sys.executable, str(folder / "unpack.py"), str(target), *streams]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_parts_are_joined_and_the_files_are_the_same(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "bundle", 1)
    assert sorted(path.name for path in folder.glob("packages.*")) == [
        "packages.1",
        "packages.2",
        "packages.3",
    ]
    assert all(path.stat().st_size <= 2**20 for path in folder.glob("packages.*"))
    status, said = unpack(folder, tmp_path / "there")
    assert status == 0 and f"source {tmp_path}/there/activate" in said
    sent, arrived = tmp_path / "packages", tmp_path / "there/packages"
    assert (arrived / "weights.bin").read_bytes() == (sent / "weights.bin").read_bytes()
    assert [path.name for path in arrived.iterdir()] == ["weights.bin"]  # no byte code
    line = f"source {tmp_path}/there/activate; echo $PYTHONPATH"
    (tmp_path / "there/megatron_stppo").mkdir()
    told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    assert told.startswith(f"{tmp_path}/there/megatron_stppo:{tmp_path}/there/packages")


@pytest.mark.parametrize("fault", ["absent", "damaged", "another Python", "another torch", "unknown stream"])
def test_a_bundle_that_does_not_fit_gets_one_line_and_nothing_is_unpacked(fault: str, tmp_path: Path) -> None:
    folder, streams, said = bundle(tmp_path / "bundle", 1), (), ""
    manifest = json.loads((folder / "manifest.json").read_text())
    if fault == "absent":
        (folder / "packages.2").unlink()
        said = "packages: packages.2 has not arrived (1048576 bytes)"
    elif fault == "damaged":
        with (folder / "packages.2").open("r+b") as file:
            file.write(b"x")
        said = "packages: packages.2 is damaged; copy it again"
    elif fault == "another Python":
        manifest["python"], said = "2.7", "run unpack.py with Python 2.7"
    elif fault == "another torch":
        manifest["torch"], said = "1.0.0", "the bundle is for 1.0.0"
    else:
        streams, said = ("weights",), "STREAM=weights: this bundle has packages"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    status, told = unpack(folder, tmp_path / "there", *streams)
    assert status == 1 and said in told and len(told.splitlines()) == 1
    assert not (tmp_path / "there/packages").exists()


def test_wrong_arguments_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").write_text("x")
    (tmp_path / "empty").write_text("numpy\n")
    for given, said in (
        (["build", "--output", str(tmp_path)], "is not empty"),
        (
            ["build", "--output", str(tmp_path / "new"), "--present", str(tmp_path / "empty")],
            "has no line NAME==",
        ),
        (["rehearse", str(tmp_path / "new"), "--present", str(tmp_path / "none")], "No such file"),
    ):
        assert offline_bundle.main(given) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("offline_bundle: ") and said in line
