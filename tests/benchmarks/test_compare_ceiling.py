"""The ceiling, against numbers worked out by hand for a model of two layers."""

import pytest
from comparison.ceiling import (
    ModelShape,
    Pass,
    Rates,
    Workload,
    decode_step,
    least_seconds,
    most_tokens_per_second,
    prefill,
)

from .fakes import FIELDS, SHAPE

# Per layer q 8x8, k and v 8x4 each, o 8x8, and three of 8x16: 64 + 64 + 64 + 384 = 576 weights. The head: 80.


def test_the_weights_of_all_matrices_are_counted() -> None:
    assert SHAPE.head_dim == 4
    assert SHAPE.num_layer_weights == 2 * 576
    assert SHAPE.num_head_weights == 80
    assert SHAPE.read_bytes == 2 * (1152 + 80)


def test_a_known_shape_has_the_parameters_it_is_named_for() -> None:
    fields = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    }
    shape = ModelShape.of(fields, weight_bytes=2, cache_bytes=2)
    assert shape.num_layer_weights + shape.num_head_weights == 134_479_872  # without norms
    assert shape.cached_bytes(1) == 23_040


def test_int8_weights_halve_the_bytes_and_not_the_cache() -> None:
    shape = ModelShape.of(FIELDS, weight_bytes=1, cache_bytes=2)
    assert shape.read_bytes == 1232
    assert shape.cached_bytes(1) == SHAPE.cached_bytes(1) == 2 * 2 * 1 * 4 * 2


def test_a_prompt_is_multiplied_by_the_layers_and_its_last_token_by_the_head() -> None:
    # 3 tokens: 2 * 1152 * 3 = 6912; attention 4 * 2 layers * 2 heads * 4 * (1 + 2 + 3) = 384; head 2 * 80 = 160.
    assert prefill(SHAPE, Workload(1, 3, 1)) == Pass(num_flops=7456, num_bytes=2464)
    assert prefill(SHAPE, Workload(5, 3, 1)) == Pass(num_flops=5 * 7456, num_bytes=2464)


def test_a_decode_step_reads_weights_once_and_each_request_s_cache() -> None:
    # The second token out: 3 tokens are cached, attention sees 4. 2 * 1232 = 2464; attention 4 * 2 * 2 * 4 * 4 = 256.
    assert decode_step(SHAPE, Workload(1, 3, 4), 1) == Pass(num_flops=2720, num_bytes=2464 + 3 * 32)
    assert decode_step(SHAPE, Workload(6, 3, 4), 1) == Pass(num_flops=6 * 2720, num_bytes=2464 + 6 * 3 * 32)
    assert decode_step(SHAPE, Workload(1, 3, 4), 3) == Pass(num_flops=2848, num_bytes=2464 + 5 * 32)


def test_a_pass_takes_the_larger_of_its_two_times() -> None:
    assert Pass(num_flops=100, num_bytes=100).seconds(Rates(bytes_per_second=10, flops_per_second=20)) == 10.0
    assert Pass(num_flops=100, num_bytes=100).seconds(Rates(bytes_per_second=20, flops_per_second=4)) == 25.0


def test_passes_add_up_to_the_least_time() -> None:
    slow_products = Rates(bytes_per_second=1e12, flops_per_second=1.0)
    assert least_seconds(SHAPE, Workload(1, 3, 1), slow_products) == 7456
    assert least_seconds(SHAPE, Workload(1, 3, 3), slow_products) == 7456 + 2720 + 2784
    slow_memory = Rates(bytes_per_second=1.0, flops_per_second=1e12)
    assert least_seconds(SHAPE, Workload(1, 3, 3), slow_memory) == 2464 + (2464 + 96) + (2464 + 128)


def test_the_most_tokens_per_second_are_in_the_workload_s_unit() -> None:
    rates = Rates(bytes_per_second=1e12, flops_per_second=7456)
    assert most_tokens_per_second(SHAPE, Workload(1, 3, 1), rates) == 3.0  # prompt tokens in one second
    two = most_tokens_per_second(SHAPE, Workload(1, 3, 2), rates)
    assert two == pytest.approx(2 / (1 + 2720 / 7456))
