"""Says how many bits each matrix gets where weights are rounded as they are loaded, and how much memory that makes.

A small model loses more by rounding than a large one, and its head is a larger part of it. So with int4 the matrices of
its layers have a bit more, and its head has less than the 8 bits of a large one's.
"""

from dataclasses import dataclass

from chairlift.config import Quantization

SMALL_PARAMETERS = 2**30
"""Models with fewer parameters are small."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Names the bits of a weight, without its share of scales and offsets, by kind of matrix."""

    most: int
    head: int  # and of the embedding, if it is the same
    values: int  # of the projections among which attention's values are
    sensitive: int  # of sensitive matrices in some layers: `is_sensitive_layer`
    keeps_errors: bool  # of the weights of attention's values, in as many bits as these have


_BYTES = Widths(most=8, head=8, values=8, sensitive=8, keeps_errors=True)
_HALF_BYTES = Widths(most=4, head=8, values=4, sensitive=8, keeps_errors=True)
_OF_SMALL_MODELS = Widths(most=5, head=6, values=6, sensitive=6, keeps_errors=False)


def widths_for(quantization: Quantization | None, num_parameters: int) -> Widths | None:
    """Returns the bits of a model of that size on a CPU; None: nothing is rounded."""
    if quantization is Quantization.INT8:
        return _BYTES
    if quantization is Quantization.INT4:
        return _OF_SMALL_MODELS if _is_small(num_parameters) else _HALF_BYTES
    return None


def is_sensitive_layer(index: int, num_layers: int) -> bool:
    """Returns true for the first and last eighth of the layers and every third between them.

    These are the layers whose sensitive matrices have more bits in llama.cpp's mixed formats.
    """
    eighth = num_layers // 8
    return index < eighth or index >= 7 * num_layers // 8 or (index - eighth) % 3 == 2


def bytes_per_weight(quantization: Quantization, num_parameters: int, *, has_experts: bool) -> float:
    """Returns bytes per weight of a model of that size, with its share of its group's scale and offset.

    With int4 it is about a mean of the widths above, where experts have the fewest bits. So it is with fp8, where the
    embedding and the head have 16 bits.
    """
    if quantization is Quantization.FP8:
        return 9 / 8 if has_experts else 10 / 8
    if quantization is Quantization.INT8:
        return 8.5 / 8
    if _is_small(num_parameters):
        return 6.25 / 8
    return 4.75 / 8 if has_experts else 5.5 / 8


def _is_small(num_parameters: int) -> bool:
    return num_parameters < SMALL_PARAMETERS
