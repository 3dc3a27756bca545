"""Invalid arguments are reported before any device uses them, so these tests need only the CPU."""

import pytest
import torch

from megatron_stppo import ops


def surrogate_arguments():
    return {
        "logprob": torch.zeros(4),
        "old_logprob": torch.zeros(4),
        "advantage": torch.zeros(4),
        "segment_offsets": torch.tensor([0, 4]),
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"segment_offsets": torch.tensor([0, 3, 2, 4])}, r"segment_offsets=\[0, 3, 2, 4\] must start at 0"),
        ({"segment_offsets": torch.tensor([1, 4])}, "must start at 0"),
        ({"segment_offsets": torch.tensor([0, 3])}, "end at 4"),
        ({"segment_offsets": torch.tensor([], dtype=torch.int64)}, "for no segments"),
        (
            {"segment_offsets": torch.tensor([0.0, 4.0])},
            "segment_offsets has dtype float32; give int32 or int64",
        ),
        ({"old_logprob": torch.zeros(4, device="meta")}, "old_logprob is on meta; move it to cpu"),
        ({"old_logprob": torch.zeros(4, dtype=torch.float64)}, "old_logprob has dtype float64; give float32"),
        ({"logprob": torch.zeros(4, dtype=torch.bfloat16)}, "logprob has dtype bfloat16"),
        ({"logprob": torch.zeros(2, 2)}, r"logprob has shape \[2, 2\]"),
        ({"advantage": torch.zeros(5)}, r"advantage has shape \[5\]; give \[4\]"),
        ({"advantage": torch.zeros(8)[::2]}, "advantage is not contiguous"),
        ({"weight": torch.ones(3)}, r"weight has shape \[3\]"),
    ],
)
def test_clipped_surrogate_names_a_wrong_argument(wrong, says):
    with pytest.raises(ValueError, match=says):
        ops.clipped_surrogate(**(surrogate_arguments() | wrong))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"target": torch.tensor([1, 4])}, r"target\[1\]=4 lies outside every shard"),
        ({"target": torch.tensor([-1, 0])}, r"target\[0\]=-1 lies outside"),
        ({"target": torch.tensor([0, 3]), "vocab_size": 3}, r"target\[1\]=3 lies outside"),
        ({"target": torch.tensor([0])}, r"target has shape \[1\]; give \[2\]"),
        ({"target": torch.tensor([0, 1], dtype=torch.int32)}, "target has dtype int32; give int64"),
        ({"logits": torch.zeros(2, 4, dtype=torch.float16)}, "give float32 or bfloat16"),
        ({"logits": torch.zeros(4, 2).t()}, "logits is not contiguous"),
        ({"logits": torch.zeros(4)}, r"logits has shape \[4\]"),
        ({"target": torch.zeros(2, dtype=torch.int64, device="meta")}, "target is on meta"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": torch.tensor([1.0, -1.0])}, "temperature holds a row"),
        ({"temperature": torch.tensor([1.0])}, r"temperature has shape \[1\]"),
        ({"vocab_start": -1}, "vocab_start=-1"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_vocab_logprob_names_a_wrong_argument(wrong, says):
    good = {"logits": torch.zeros(2, 4), "target": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=says):
        ops.vocab_logprob(**(good | wrong))
