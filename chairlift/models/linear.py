"""The one product that a decode step is made of."""

import platform

import torch
from torch import nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """`x W^T + b`. On a CPU in bfloat16 the weight can be packed once, which oneDNN otherwise does in every call."""

    _packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Brings the weight into oneDNN's blocked layout and lets go of the plain one."""
        # The packed tensor's layout is opaque: it can only be given back to the operator below.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in] -> [T, out]`"""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


def can_pack(weight: torch.Tensor) -> bool:
    """True where packing pays: measured on x86, it does for bfloat16 and does not for float32."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return has_onednn and is_x86 and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
