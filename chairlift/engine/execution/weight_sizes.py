"""Computes how much memory a model's weights take, and advises where there is less."""

from chairlift.config import DType, Quantization
from chairlift.errors import sized
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
    bytes_per_weight = _bytes_per_weight(format, has_experts)
    if kept is None:
        return int(num_parameters * bytes_per_weight)
    num_plain = num_parameters - kept.num_parameters + (0 if is_native else kept.num_dequantized)
    return int(num_plain * bytes_per_weight) + kept.num_bytes


def describe_shortage(num_bytes: int, form: DType | Quantization | GroupedSize, free_bytes: int) -> str:
    """Says that the weights do not fit, and by how much."""
    name = "they are stored" if isinstance(form, GroupedSize) else form
    return f"the weights do not fit: they need {sized(num_bytes)} as {name}, and {sized(free_bytes)} are free"


def advise(
    num_parameters: int, quantization: Quantization | None, formats: list[Quantization], *, has_experts: bool
) -> str:
    """Advises where the weights do not fit. `formats`: those that the device could quantize them to."""
    sizes = {each: _bytes_per_weight(each, has_experts) for each in formats}
    least = _bytes_per_weight(quantization or DType.BFLOAT16, has_experts)
    smaller = [each for each, size in sizes.items() if size < least]
    if not smaller:
        return "choose a smaller model, or one that is quantized"
    needs = " and ".join(f"{each} {sized(num_parameters * sizes[each])}" for each in smaller)
    return f"with quantization they would need less ({needs}), or choose a smaller model"


def formats_for(*, is_native: bool, has_own_kernels: bool) -> list[Quantization]:
    """Lists the formats that plain weights can be quantized to."""
    return [each for each in Quantization if (has_own_kernels if each.is_for_gpu else is_native)]


def _bytes_per_weight(format: DType | Quantization, has_experts: bool) -> float:
    return format.num_bytes if isinstance(format, DType) else format.bytes_per_weight(has_experts=has_experts)
