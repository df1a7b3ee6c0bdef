"""The native product in bfloat16 beside oneDNN's, by way of torch, on one thread.

    python benchmarks/products.py --rows 1 8 32 512 2048 --shapes 1024x7168 3584x1024

A shape is inputs x outputs of a matrix. oneDNN multiplies it twice: as `torch.nn.functional.linear` does, and with
weights that were packed before, which is faster. The three take turns, and the fastest of several calls counts, in the
processor's time of the calling thread, so that other programs disturb little. The native results are float32, the
others bfloat16. The last line is JSON. The table in docs/performance.md is made of it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from machine import format_table, parser_of, print_report

from chairlift.config import DType
from chairlift.models.blocks import AttentionBlock
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.decoder import Decoder
from chairlift.models.rotary import RopeConfig

NATIVE, LINEAR, PACKED = "chairlift", "linear", "packed"
_HEADS = {NATIVE: "Chairlift", LINEAR: "torch's linear", PACKED: "oneDNN, packed"}
_MAX_SEQ_LEN = 64  # of a model that computes nothing but products with its head
_ATTENTION = AttentionBlock(num_heads=1, num_kv_heads=1, head_dim=16, scale=0.25, rope=RopeConfig(10_000.0))


def main() -> int:
    """Measures, prints a table, and as the last line everything as JSON; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512, 2048], help="(%(default)s)")
    parser.add_argument("--shapes", nargs="+", default=["1024x7168", "2048x1024", "3584x1024"], help="(%(default)s)")
    parser.add_argument("--calls", type=int, default=9, help="of each product, of which the fastest counts")
    arguments = parser.parse_args()
    try:
        shapes = [_sizes_of(shape) for shape in arguments.shapes]
    except ValueError as error:
        print(f"products.py: {error}", file=sys.stderr)
        return 2
    with _one_thread():
        results = [measure(rows, *shape, arguments.calls) for shape in shapes for rows in arguments.rows]
    print(format_table([["rows x inputs x outputs, GFLOP/s", *_HEADS.values()], *map(_cells, results)]))
    print_report(arguments, results=results)
    return 0


@torch.inference_mode()
def measure(num_rows: int, num_inputs: int, num_outputs: int, num_calls: int) -> dict[str, Any]:
    """GFLOP/s of each way to multiply random rows by a random matrix."""
    rows = torch.randn(num_rows, num_inputs).bfloat16()
    weight = torch.randn(num_outputs, num_inputs).bfloat16()
    decoder = CpuDecoder(_model_of(weight), _MAX_SEQ_LEN)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
    products: dict[str, Callable[[], torch.Tensor]] = {
        NATIVE: lambda: decoder.logits(rows),
        LINEAR: lambda: torch.nn.functional.linear(rows, weight),
        PACKED: lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], ""),
    }
    expected = rows.float() @ weight.float().T
    for name, product in products.items():
        error = float((product().float() - expected).norm() / expected.norm())
        if not error < 0.01:
            raise RuntimeError(f"{name} is wrong by {error:.3f}")
    seconds = dict.fromkeys(products, float("inf"))
    for _ in range(num_calls):
        for name, product in products.items():
            start = time.thread_time()
            product()
            seconds[name] = min(seconds[name], time.thread_time() - start)
    flop = 2 * num_rows * num_inputs * num_outputs
    rates = {name: round(flop / each / 1e9, 1) for name, each in seconds.items()}
    return {"rows": num_rows, "inputs": num_inputs, "outputs": num_outputs, "gflops": rates}


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _model_of(weight: torch.Tensor) -> Decoder:
    """A model whose head is that matrix."""
    num_outputs, num_inputs = weight.shape
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=num_outputs,
        hidden_size=num_inputs,
        layers=((_ATTENTION,),),
        rms_norm_eps=1e-5,
        max_position_embeddings=_MAX_SEQ_LEN,
        is_tied=True,
        dtype=DType.BFLOAT16,
    )
    model = Decoder(config).requires_grad_(False).to(torch.bfloat16)
    model.model.embed_tokens.weight.copy_(weight)
    model.finalize(_MAX_SEQ_LEN)
    return model


def _sizes_of(shape: str) -> tuple[int, int]:
    inputs, is_pair, outputs = shape.partition("x")
    if not (is_pair and inputs.isdecimal() and outputs.isdecimal()):
        raise ValueError(f"{shape!r} is no shape: write INPUTSxOUTPUTS")
    return int(inputs), int(outputs)


def _cells(result: dict[str, Any]) -> list[str]:
    sizes = f"{result['rows']} x {result['inputs']} x {result['outputs']}"
    return [sizes, *(f"{result['gflops'][name]:,.0f}" for name in _HEADS)]


if __name__ == "__main__":
    sys.exit(main())
