"""The FLOP that the planner counts on meta tensors."""

from __future__ import annotations

import torch

from megatron_stppo.model.experts import products
from megatron_stppo.plan.meter import Meter


def test_a_product_that_is_added_in_another_type_counts_as_a_product() -> None:
    left = torch.empty(3, 5, device="meta", dtype=torch.bfloat16)
    right = torch.empty(5, 7, device="meta", dtype=torch.bfloat16)
    sums = torch.empty(3, 7, device="meta")
    with Meter() as meter:
        torch.addmm(sums, left, right, out_dtype=torch.float32, out=sums)
    assert meter.flop == 2 * 3 * 5 * 7


def test_grouped_products_count_each_row_once_whatever_the_number_of_experts() -> None:
    rows = torch.empty(6, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.empty(8, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    ends = torch.empty(3, device="meta", dtype=torch.int32)
    with Meter() as meter:
        out = products(rows, ends, weights)
        forward = meter.flop
        out.backward(torch.empty_like(out))
    assert forward == 2 * 6 * 16 * 8
    assert meter.flop == 3 * forward  # backward: a product for the rows, and one for the weights
