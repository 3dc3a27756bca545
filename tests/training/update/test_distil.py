"""On-policy distillation: the frozen reference is a teacher of its own folder, perhaps of another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.update import distilling, layouts

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
# {case: (ranks, parallel, family and sizes of the teacher, rank of the student's adapters)}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "another family of half the layers": (1, {}, {"family": "llama", **SMALL}, 0),
    "more rows than tokens, a student with adapters": (1, {}, {"family": "qwen2", "vocab_size": 320}, 4),
    "pipeline": (2, {"pipeline": 2}, {"family": "qwen3", **SMALL}, 0),
    "experts, tensor": (2, {"tensor": 2, "sequence": True}, {"family": "qwen3_moe", **SMALL}, 0),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The student, and a teacher that is a copy with changed weights."""
    import torch
    import transformers

    root = tmp_path_factory.mktemp("models")
    layouts.write_model(root / "student")
    layouts.write_model(root / "copy")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "copy")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    model.save_pretrained(root / "teacher")
    return {name: str(root / name) for name in ("student", "copy", "teacher")}


@pytest.mark.parametrize("case", CASES)
def test_a_teacher_of_another_size_has_the_log_probs_that_transformers_computes(
    case: str, folders: dict[str, str], tmp_path: Path
) -> None:
    import torch
    import transformers

    ranks, parallel, sizes, rank = CASES[case]
    layouts.write_model(tmp_path / "teacher", **sizes)
    teacher = str(tmp_path / "teacher")
    found = run_ranks(distilling.scored, ranks, folders["student"], teacher, str(tmp_path), parallel, rank)
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher)
    batch, expected = layouts.batch(), []
    for start, end in zip(batch.sequence_offsets[:-1], batch.sequence_offsets[1:], strict=True):
        tokens = batch.tokens_P[start:end]
        with torch.no_grad():
            logprob = model(tokens[None]).logits[0].log_softmax(-1)
        inside = batch.action_index_T[(batch.action_index_T >= start) & (batch.action_index_T < end)]
        expected += [float(logprob[t - start - 1, batch.tokens_P[t]]) for t in inside]
    for of_rank in found:
        assert of_rank == pytest.approx(expected, abs=2e-4)


def test_the_student_approaches_its_teacher(folders: dict[str, str], tmp_path: Path) -> None:
    rows = run_ranks(distilling.learned, 1, folders["student"], folders["teacher"], str(tmp_path), 12)[0]
    kl = [row["kl/reference_k3"] for row, _ in rows]
    assert sum(kl[-3:]) < 0.5 * sum(kl[:3]), kl
    assert all(row["actor/effective_lr"] > 0 for row, _ in rows), "equal rewards hold no step"


def test_a_teacher_with_the_students_weights_gives_advantages_of_exactly_0(
    folders: dict[str, str], tmp_path: Path
) -> None:
    ((row, largest),) = run_ranks(
        distilling.learned, 1, folders["student"], folders["copy"], str(tmp_path), 1
    )[0]
    assert (largest, row["kl/reference"], row["actor/gradient_norm"]) == (0.0, 0.0, 0.0)


def test_a_run_is_not_resumed_with_another_teacher(folders: dict[str, str], tmp_path: Path) -> None:
    student, copy, teacher = (folders[name] for name in ("student", "copy", "teacher"))
    same, equal, other, none = run_ranks(
        distilling.resumed, 1, student, (copy, student, teacher, None), str(tmp_path)
    )[0]
    assert same == equal == none == "", "only the weights count"
    assert other == (
        f"model.reference_path={teacher}: holds other weights than the KL reference that the run began with; "
        "give that model, or another run.name"
    )
    before, after = run_ranks(distilling.resumed, 1, student, (teacher, None), str(tmp_path))[0]
    assert before == "" and after.startswith("model.reference_path=None: holds other weights")
