"""Functions of logits for kernels that sample: what temperature, min-p and a limit make of them."""

# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def read(logits: tl.tensor, row: tl.tensor, row_stride: tl.tensor, at: tl.tensor, size: tl.tensor) -> tl.tensor:
    """Logits as float32; inf for NaN, which counts as the largest, and -inf beyond the row's end."""
    x = tl.load(logits + row * row_stride + at, mask=at < size, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def order_of(x: tl.tensor) -> tl.tensor:
    """Maps float32 to int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def knob(table: tl.tensor, index: tl.constexpr, table_stride: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Reads a row's knob as float32."""
    return tl.load(table + index * table_stride + row).to(tl.float32)


@triton.jit
def scale(x: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits divided by the temperature; the largest becomes 0."""
    return tl.div_rn(x - peak, temperature)


@triton.jit
def mass_of(scaled: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Returns probabilities in units of the likeliest token's; 0 below the limit."""
    return tl.where(scaled >= limit, tl.exp(scaled), 0.0)


@triton.jit
def limit_of(found: tl.tensor, peak: tl.tensor, temperature: tl.tensor, last_shift: tl.tensor) -> tl.tensor:
    """Returns the scaled logit whose order was found but for the bits below that shift, which are the sign's."""
    order = tl.where(found < 0, found | ((1 << last_shift) - 1), found)
    order = tl.minimum(order, order_of(peak))
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    return scale(bits.to(tl.float32, bitcast=True), peak, temperature)


@triton.jit
def floor_of(min_p: tl.tensor) -> tl.tensor:
    """Returns the smallest scaled logit that min-p keeps."""
    return tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-30)), -float("inf"))
