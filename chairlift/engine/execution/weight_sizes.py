"""Computes how much memory a model's weights take, and advises where there is less."""

from chairlift.config import DType, Quantization
from chairlift.errors import sized
from chairlift.models.precision import bytes_per_weight
from chairlift.models.stored import GroupedSize


def weigh(
    num_parameters: int,
    format: DType | Quantization,
    kept: GroupedSize | None = None,
    *,
    has_experts: bool,
    is_native: bool,
) -> int:
    """Bytes of the weights; beside those kept in groups also of the workspace in which torch makes numbers of them."""
    weight_bytes = _bytes_per_weight(format, num_parameters, has_experts)
    if kept is None:
        return int(num_parameters * weight_bytes)
    num_plain = num_parameters - kept.num_parameters + (0 if is_native else kept.num_dequantized)
    return int(num_plain * weight_bytes) + kept.num_bytes


def describe_shortage(num_bytes: int, form: DType | Quantization | GroupedSize, free_bytes: int) -> str:
    """Says that the weights do not fit, and by how much."""
    name = "they are stored" if isinstance(form, GroupedSize) else form
    return f"the weights do not fit: they need {sized(num_bytes)} as {name}, and {sized(free_bytes)} are free"


def advise(
    num_parameters: int, quantization: Quantization | None, formats: list[Quantization], *, has_experts: bool
) -> str:
    """Advises where the weights do not fit. `formats`: those that the device could quantize them to."""
    sizes = {each: _bytes_per_weight(each, num_parameters, has_experts) for each in formats}
    least = _bytes_per_weight(quantization or DType.BFLOAT16, num_parameters, has_experts)
    smaller = [each for each, size in sizes.items() if size < least]
    if not smaller:
        return "choose a smaller model, or one that is quantized"
    needs = " and ".join(f"{each} {sized(num_parameters * sizes[each])}" for each in smaller)
    return f"with quantization they would need less ({needs}), or choose a smaller model"


def formats_for(*, is_native: bool, has_own_kernels: bool) -> list[Quantization]:
    """Lists the formats that plain weights can be quantized to."""
    return [each for each in Quantization if (has_own_kernels if each.is_for_gpu else is_native)]


def _bytes_per_weight(format: DType | Quantization, num_parameters: int, has_experts: bool) -> float:
    if isinstance(format, DType):
        return format.num_bytes
    return bytes_per_weight(format, num_parameters, has_experts=has_experts)
