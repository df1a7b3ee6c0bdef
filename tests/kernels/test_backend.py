"""The attention backend whose kernels are in Triton, beside attention over padded copies."""

from dataclasses import replace

import pytest
import torch

from chairlift.models.attention import Backend, Projections
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.attention.triton import TritonBackend
from tests.models import attention_support as support
from tests.models.attention_support import LAYER, POISON, Row, make_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODE, PREFILL, MIXED = support.DECODE, support.PREFILL, support.BATCHES["mixed"]
LAYERS = {
    "plain": support.plain(16),
    "window": support.layers(0.2, (None, None, 7)),
    "window and soft cap": support.layers(0.3, (3, None, 12), 0.7),
}
in_every_phase = pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])


@in_every_phase
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())
def test_attention_equals_attention_over_padded_copies(layers: support.Layers, rows: list[Row]) -> None:
    tokens = support.random_tokens(rows).to(DEVICE)
    manager = make_cache(rows, tokens, background=POISON)
    output = support.attend(manager, rows, tokens, TritonBackend(layers))
    support.assert_near(output, support.new_parts(support.reference(tokens, layers), rows))


@in_every_phase
def test_new_keys_and_values_are_appended_in_place_and_nothing_else_is_written(rows: list[Row]) -> None:
    tokens = support.random_tokens(rows).to(DEVICE)
    managers = [make_cache(rows, tokens, background=POISON) for _ in range(2)]
    backends: list[Backend] = [TritonBackend(support.plain(16)), TorchBackend(support.plain(16), is_in_place=False)]
    for manager, backend in zip(managers, backends, strict=True):
        support.attend(manager, rows, tokens, backend)
    assert torch.equal(managers[0].blocks[0], managers[1].blocks[0])


@pytest.mark.parametrize("window", [None, 7])
def test_of_rows_that_decode_the_host_s_numbers_are_not_looked_at(window: int | None) -> None:
    layers, tokens = support.layers(0.25, (None, None, window)), support.random_tokens(DECODE).to(DEVICE)
    (collection,) = make_cache(DECODE, tokens).fetch([row.slot for row in DECODE])
    batch = replace(support.batch_of(DECODE, DEVICE), slots=(0,) * len(DECODE), num_cached_tokens=(0,) * len(DECODE))
    attend = TritonBackend(layers).prepare(batch, replace(collection, max_cache_length=1))
    output = attend(LAYER, Projections(*tokens.new_parts(DECODE)))
    support.assert_near(output, support.new_parts(support.reference(tokens, layers), DECODE))


def test_prompts_go_to_the_backend_that_is_given_for_them() -> None:
    tokens, given = support.random_tokens(MIXED).to(DEVICE), support.plain(16)
    other = support.layers(0.5)  # so that one sees which computed what
    backend = TritonBackend(given, TritonBackend(other))
    output = support.attend(make_cache(MIXED, tokens), MIXED, tokens, backend)
    parts = [support.new_parts(support.reference(tokens, layers), MIXED) for layers in (given, other)]
    support.assert_near(output, torch.cat((parts[0][: len(DECODE)], parts[1][len(DECODE) :])))


def test_so_do_those_of_a_padded_step() -> None:
    tokens, given, other = support.random_tokens(MIXED).to(DEVICE), support.plain(16), support.layers(0.5)
    num_real = sum(row.num_new for row in MIXED)
    batch = support.padded_batch_of(MIXED, num_real + 2, 8, 6, 1, DEVICE)
    new = [torch.cat((part, part[:2])) for part in tokens.new_parts(MIXED)]
    backend = TritonBackend(given, TritonBackend(other))
    output = backend.prepare_padded(batch, make_cache(MIXED, tokens).blocks[0])(LAYER, Projections(*new))
    parts = [support.new_parts(support.reference(tokens, layers), MIXED) for layers in (given, other)]
    support.assert_near(output[:num_real], torch.cat((parts[0][: len(DECODE)], parts[1][len(DECODE) :])))


def test_a_padded_step_has_the_sinks_of_an_even_one() -> None:
    tokens, num_real = support.random_tokens(MIXED).to(DEVICE), sum(row.num_new for row in MIXED)
    manager, backend = make_cache(MIXED, tokens), TritonBackend(support.plain(16))
    new = tokens.new_parts(MIXED)
    sinks = torch.linspace(-1.0, 2.0, new[0].shape[1], device=DEVICE)
    batch = support.padded_batch_of(MIXED, num_real + 2, 8, 6, 1, DEVICE)
    padded = [torch.cat((part, part[:2])) for part in new]
    output = backend.prepare_padded(batch, manager.blocks[0])(
        LAYER, Projections(padded[0], padded[1], padded[2], sinks)
    )
    (collection,) = manager.fetch([row.slot for row in MIXED])
    even = backend.prepare(support.batch_of(MIXED, DEVICE), collection)
    support.assert_near(output[:num_real], even(LAYER, Projections(new[0], new[1], new[2], sinks)))
    assert (output[:num_real] - even(LAYER, Projections(new[0], new[1], new[2]))).abs().max() > 0.01


@pytest.mark.parametrize("rows", [DECODE, PREFILL, [*MIXED, Row(6, 14, 1)]], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize(("layers", "num_decode"), [("plain", 4), ("window and soft cap", 16)])
def test_a_padded_step_gives_its_rows_what_they_get_alone(rows: list[Row], layers: str, num_decode: int) -> None:
    tokens, scratch, num_real = support.random_tokens(rows).to(DEVICE), 1, sum(row.num_new for row in rows)
    blocks = make_cache(rows, tokens, background=POISON).blocks[0]
    batch = support.padded_batch_of(rows, 24, num_decode, 6, scratch, DEVICE)
    parts = [torch.cat((part, part[:1].expand(24 - num_real, -1, -1))) for part in tokens.new_parts(rows)]
    before = blocks.clone()
    output = TritonBackend(LAYERS[layers]).prepare_padded(batch, blocks)(LAYER, Projections(*parts))
    assert output.isfinite().all()
    support.assert_near(output[:num_real], support.new_parts(support.reference(tokens, LAYERS[layers]), rows))
    written = (blocks != before).flatten(2).any(dim=2).any(dim=1).nonzero().flatten().tolist()
    assert written == sorted({*(row.slot for row in rows), *([scratch] if num_real < 24 else [])})
