"""Normalises and rotates the queries and keys of each token, head by head, in one kernel."""

# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_HEADS = 8  # of a program


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMS norms of queries and of keys, each over a head: factors `[D]`, or 1 + these if `is_offset`."""

    query_factors: torch.Tensor
    key_factors: torch.Tensor
    eps: float
    is_offset: bool = False


def rotate(
    heads: torch.Tensor,
    num_heads: int,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """`heads` `[T, Hq + Hkv, D]`, the first `num_heads` of them queries -> the same, normalised and then rotated.

    `cosines` and `sines` are `[T, 1, R]`: the first R elements of a head rotate, each half of these with the other, and
    None rotates nothing. The elements of a head are dense, as are R angles. The result is dense. Between norm and
    rotation numbers are rounded to the dtype of `heads`.
    """
    num_tokens, num_all, head_dim = heads.shape
    assert heads.stride(2) == 1
    output = torch.empty(num_tokens, num_all, head_dim, dtype=heads.dtype, device=heads.device)
    angles = (heads, heads) if cosines is None or sines is None else (cosines, sines)
    assert angles[0].stride() == angles[1].stride()
    factors = (heads, heads) if norms is None else (norms.query_factors, norms.key_factors)
    _rotate[(num_tokens, triton.cdiv(num_all, _HEADS))](
        heads, output, *angles, *factors, heads.stride(0), heads.stride(1), angles[0].stride(0),
        0.0 if norms is None else norms.eps, HQ=num_heads, HALL=num_all, D=head_dim,
        DP=triton.next_power_of_2(head_dim), R=0 if cosines is None else cosines.shape[2], NORMS=norms is not None,
        IS_OFFSET=norms is not None and norms.is_offset, H=_HEADS, num_warps=4,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize_on_alignment=["heads"])
def _rotate(
    heads: tl.tensor, output: tl.tensor, cosines: tl.tensor, sines: tl.tensor, query_factors: tl.tensor,
    key_factors: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, angle_stride: tl.tensor, eps: tl.tensor,
    HQ: tl.constexpr, HALL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, NORMS: tl.constexpr,
    IS_OFFSET: tl.constexpr, H: tl.constexpr,
) -> None:  # fmt: skip
    """Takes H heads of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * H + tl.arange(0, H)[:, None]
    at = tl.arange(0, DP)[None, :]
    partner = tl.where(at < R // 2, at + R // 2, tl.where(at < R, at - R // 2, at))
    is_in, is_query = (head < HALL) & (at < D), head < HQ
    own = heads + token * token_stride + head * head_stride
    x = tl.load(own + at, mask=is_in, other=0.0).to(tl.float32)
    y = tl.load(own + partner, mask=is_in, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = _normalise(x * scale, query_factors, key_factors, at, is_in, is_query, heads.dtype.element_ty, IS_OFFSET)
        y = _normalise(
            y * scale, query_factors, key_factors, partner, is_in, is_query, heads.dtype.element_ty, IS_OFFSET
        )
    if R > 0:
        cosine = tl.load(cosines + token * angle_stride + at, mask=at < R, other=1.0).to(tl.float32)
        sine = tl.load(sines + token * angle_stride + at, mask=at < R, other=0.0).to(tl.float32)
        x = x * cosine + tl.where(at < R // 2, -y, y) * sine
    place = output + (token * HALL + head) * D + at
    tl.store(place, x.to(output.dtype.element_ty), mask=is_in)


@triton.jit
def _normalise(
    scaled: tl.tensor, query_factors: tl.tensor, key_factors: tl.tensor, at: tl.tensor, is_in: tl.tensor,
    is_query: tl.tensor, dtype: tl.constexpr, IS_OFFSET: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Multiplies each head by its factors, with the roundings of the operators that this stands for."""
    of_query = tl.load(query_factors + at, mask=is_in & is_query, other=0.0)
    of_key = tl.load(key_factors + at, mask=is_in & (is_query == 0), other=0.0)
    factors = tl.where(is_query, of_query, of_key).to(tl.float32)
    if IS_OFFSET:
        return (scaled * (1.0 + factors)).to(dtype).to(tl.float32)
    return (scaled.to(dtype).to(tl.float32) * factors).to(dtype).to(tl.float32)
