"""The FLOP that the planner counts on meta tensors."""

from __future__ import annotations

import torch

from megatron_stppo.plan.meter import Meter


def test_a_product_that_is_added_in_another_type_counts_as_a_product() -> None:
    left = torch.empty(3, 5, device="meta", dtype=torch.bfloat16)
    right = torch.empty(5, 7, device="meta", dtype=torch.bfloat16)
    sums = torch.empty(3, 7, device="meta")
    with Meter() as meter:
        torch.addmm(sums, left, right, out_dtype=torch.float32, out=sums)
    assert meter.flop == 2 * 3 * 5 * 7
