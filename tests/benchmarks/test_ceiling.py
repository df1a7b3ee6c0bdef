"""The ceiling of a workload: weights, bytes and FLOPs by hand, and the matrices of transformers' models."""

import pytest
import random_recurrent
import torch
from comparison import ceiling
from comparison.ceiling import ModelShape, Pass, Rates, Workload
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from .conftest import FIELDS, SHAPE

# Per layer q 8x8, k and v 8x4 each, o 8x8, and three of 8x16: 64 + 64 + 64 + 384 = 576 weights. The head: 80.


def test_the_weights_of_all_matrices_are_counted_and_int8_halves_their_bytes_and_not_the_cache() -> None:
    assert (SHAPE.head_dim, SHAPE.num_layer_weights, SHAPE.num_head_weights) == (4, 2 * 576, 80)
    assert SHAPE.read_bytes(3) == 2 * (1152 + 80)
    int8 = ModelShape.of(FIELDS, weight_bytes=1, cache_bytes=2)
    assert int8.read_bytes(3) == 1232
    assert int8.cached_bytes(1) == SHAPE.cached_bytes(1) == 2 * 2 * 1 * 4 * 2


def test_the_ceiling_of_a_mixture_counts_the_experts_that_tokens_touch() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 2}
    mixture = ModelShape.of({**FIELDS, **sizes}, weight_bytes=1, cache_bytes=2)
    expert = 3 * FIELDS["hidden_size"] * 2
    others = mixture.num_layer_weights - 2 * expert + mixture.num_head_weights
    assert mixture.read_bytes(1) == others + 2 * expert
    assert mixture.read_bytes(2) == others + 2 * 1.75 * expert
    assert mixture.read_bytes(10**6) == others + 2 * 4 * expert


def test_a_known_shape_has_the_parameters_it_is_named_for() -> None:
    fields = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    fields |= {"head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152}
    shape = ModelShape.of(fields, weight_bytes=2, cache_bytes=2)
    assert shape.num_layer_weights + shape.num_head_weights == 134_479_872  # without norms
    assert shape.cached_bytes(1) == 23_040


@pytest.mark.parametrize("name", SHAPES)
def test_the_weights_of_layers_are_the_matrices_that_transformers_makes(name: str) -> None:
    fields = {"model_type": "llama", **SHAPES[name]}
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers  # type: ignore[no-untyped-call]
    matrices = [each.numel() for each in layers.parameters() if each.ndim == 2]
    assert ModelShape.of(config.to_dict(), weight_bytes=2, cache_bytes=2).num_layer_weights == sum(matrices)


@pytest.mark.parametrize("rank", [None, 48])
def test_latent_attention_reads_the_matrices_that_transformers_makes_and_a_short_vector_of_a_token(
    rank: int | None,
) -> None:
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": rank}
    config = AutoConfig.for_model("youtu", **FIELDS, **sizes)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers  # type: ignore[no-untyped-call]
    shape = ModelShape.of(config.to_dict(), weight_bytes=2, cache_bytes=2)
    assert shape.num_layer_weights == sum(each.numel() for each in layers.parameters() if each.ndim == 2)
    assert shape.cached_bytes(1) == 2 * (64 + 8) * 2
    assert shape.attention_flops(1) == 2 * 2 * 2 * (64 + 8 + 64)  # of two heads in two layers


def test_shared_experts_are_read_by_every_token() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 2}
    one, more = (ModelShape.of({**FIELDS, **sizes, "n_shared_experts": count}, 1, 2) for count in (0, 3))
    assert more.read_bytes(5) - one.read_bytes(5) == 2 * 3 * 3 * FIELDS["hidden_size"] * 2


def test_the_sizes_written_beside_a_file_are_those_of_the_same_shape_s_checkpoint() -> None:
    for name, shape in random_recurrent.SHAPES.items():
        vocab = SHAPES[name]["vocab_size"]
        described = random_recurrent.described(shape, vocab, weight_bytes=2)
        assert ModelShape.of(described, 2, 2) == ModelShape.of(AutoConfig.for_model(**SHAPES[name]).to_dict(), 2, 2)


def test_states_are_read_and_written_by_each_token_and_only_other_layers_have_keys() -> None:
    states: dict[str, object] = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 3}
    states |= {"linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention"]}
    shape = ModelShape.of({**FIELDS, **states}, weight_bytes=2, cache_bytes=2)
    # The first layer: 8 x (3 + 3 + 10 + 10 + 2 + 2) in, 10 x 8 out; the second one's queries have a gate, 8 x 8.
    assert shape.num_layer_weights == 8 * 30 + 80 + 64 + 2 * 384 + 192
    numbers = 2 * 3 * 5
    assert (shape.num_states, shape.cached_bytes(1)) == (numbers, 2 * 4 * 2)
    step = ceiling.decode_step(shape, Workload(6, 3, 4), 1)
    assert step.num_bytes == shape.read_bytes(6) + 6 * (3 * 16 + 2 * 4 * numbers)
    assert step.num_flops == 6 * (2 * shape.num_layer_weights + 6 * numbers + 160 + 4 * 8 * 4)


def test_a_prompt_is_multiplied_by_the_layers_and_its_last_token_by_the_head() -> None:
    # 3 tokens: 2 * 1152 * 3 = 6912; attention 4 * 2 layers * 2 heads * 4 * (1 + 2 + 3) = 384; head 2 * 80 = 160.
    for num_requests in (1, 5):
        assert ceiling.prefill(SHAPE, Workload(num_requests, 3, 1)) == Pass(
            num_flops=num_requests * 7456, num_bytes=2464
        )


def test_a_decode_step_reads_weights_once_and_each_request_s_cache() -> None:
    # The second token out: 3 tokens are cached, attention sees 4. 2 * 1232 = 2464; attention 4 * 2 * 2 * 4 * 4 = 256.
    for num_requests in (1, 6):
        step = Pass(num_flops=num_requests * 2720, num_bytes=2464 + num_requests * 3 * 32)
        assert ceiling.decode_step(SHAPE, Workload(num_requests, 3, 4), 1) == step
    assert ceiling.decode_step(SHAPE, Workload(1, 3, 4), 3) == Pass(num_flops=2848, num_bytes=2464 + 5 * 32)


def test_a_pass_takes_the_larger_of_its_two_times_and_all_together_the_least_time() -> None:
    assert Pass(num_flops=100, num_bytes=100).seconds(Rates(bytes_per_second=10, flops_per_second=20)) == 10.0
    assert Pass(num_flops=100, num_bytes=100).seconds(Rates(bytes_per_second=20, flops_per_second=4)) == 25.0
    slow_products, slow_memory = Rates(1e12, flops_per_second=1.0), Rates(bytes_per_second=1.0, flops_per_second=1e12)
    assert ceiling.least_seconds(SHAPE, Workload(1, 3, 1), slow_products) == 7456
    assert ceiling.least_seconds(SHAPE, Workload(1, 3, 3), slow_products) == 7456 + 2720 + 2784
    assert ceiling.least_seconds(SHAPE, Workload(1, 3, 3), slow_memory) == 2464 + (2464 + 96) + (2464 + 128)
    # The most tokens per second are in the workload's unit.
    rates = Rates(bytes_per_second=1e12, flops_per_second=7456)
    assert ceiling.most_tokens_per_second(SHAPE, Workload(1, 3, 1), rates) == 3.0  # prompt tokens in one second
    assert ceiling.most_tokens_per_second(SHAPE, Workload(1, 3, 2), rates) == pytest.approx(2 / (1 + 2720 / 7456))
