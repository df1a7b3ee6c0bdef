"""Which kernel multiplies by the matrices of all experts, and what is said where there is none."""

import pytest
import torch
from torch.nn import functional

from chairlift.models import grouped_experts

ENDS = torch.tensor([2, 5], dtype=torch.int32)


@pytest.mark.parametrize("num_inputs", [16, 12])  # torch's kernel takes the first, and not rows of other than 16 bytes
def test_our_own_kernel_is_asked_for_only_where_torchs_does_not_do(
    num_inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []

    def has_own(device: torch.device) -> bool:
        asked.append(device)
        return False

    monkeypatch.setattr(grouped_experts, "is_available", lambda _: True)
    monkeypatch.setattr(grouped_experts, "_has_own", has_own)
    monkeypatch.setattr(functional, "grouped_mm", lambda x, weights, **_: x @ weights[0])
    x, weights = torch.ones(5, num_inputs).bfloat16(), torch.ones(2, 8, num_inputs).bfloat16()
    product = grouped_experts.multiply(x, weights, ENDS)
    assert torch.equal(product, torch.full((5, 8), num_inputs).bfloat16())
    assert len(asked) == (0 if num_inputs == 16 else 1)
