"""Tests that products read of a calibration's tokens what they read in the model's own pass over the same tokens."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from chairlift.config import DType, Quantization
from chairlift.models import load_model, open_checkpoint
from chairlift.models.calibration import Calibration, draw_tokens
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.decoder import Decoder
from chairlift.models.layers import Linear
from chairlift.models.precision import SMALL_PARAMETERS, widths_for
from tests.models.cpu import support
from tests.support.checkpoints import make_checkpoint
from tests.support.forward_bench import SLOT_LEN, Bench, Row
from tests.support.kernels import needs_kernels

NUM_SEQUENCES, LENGTH = 3, 30
SHAPES = {name: support.SHAPES[name] for name in ("like Gemma", "like Gemma 4", "layers that differ")}


def tokens_of(config: ModelConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(config.vocab_size, (NUM_SEQUENCES, LENGTH), generator=generator)


def read_by_products(model: Decoder, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean shares of the inputs in their token's mean square, by product, in a pass with a cache."""
    shares: dict[str, torch.Tensor] = {}

    def note(name: str, _: object, inputs: tuple[torch.Tensor, ...]) -> None:
        squares = inputs[0].square()
        shares[name] = (squares / squares.mean(dim=-1, keepdim=True)).mean(dim=0)

    hooks = [
        module.register_forward_pre_hook(partial(note, name))
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    ]
    support.torch_bench(model).run([Row(slot, tokens) for slot, tokens in enumerate(token_ids.tolist())])
    for hook in hooks:
        hook.remove()
    return shares


@pytest.mark.parametrize("config", [*SHAPES.values(), support.RECURRENT], ids=[*SHAPES, "recurrent"])
def test_an_input_counts_by_its_shares_in_the_squares_of_tokens(config: ModelConfig) -> None:
    model = support.make_model(config)
    token_ids = tokens_of(config)
    expected = read_by_products(model, token_ids)
    calibration = Calibration(model, token_ids)
    names = {module: name for name, module in model.named_modules()}
    seen = set()
    for layer in model.layers:
        calibration.observe(layer)
        for linear in layer.modules():
            if isinstance(linear, Linear):
                importance = calibration.importance(linear)
                assert importance is not None
                torch.testing.assert_close(importance, expected[names[linear]], rtol=1e-4, atol=1e-6)
                seen.add(names[linear])
    assert seen == {name for name in expected if ".layers." in name}


def uneven_model() -> Decoder:
    """A model with a few inputs of its first products that are ten times as large as the others."""
    model = support.make_model(replace(support.BASE, hidden_size=128))
    for name, parameter in model.named_parameters():
        if "pre_" in name:
            parameter[::16] *= 10
    return model


def logits_in_4_bits(calibration_ids: torch.Tensor | None, rows: list[Row]) -> torch.Tensor:
    model = uneven_model()
    forward = CpuDecoder(
        model, SLOT_LEN, widths=widths_for(Quantization.INT4, SMALL_PARAMETERS), calibration_ids=calibration_ids
    )
    return torch.cat(Bench(model.config, model.dtype, forward).run(rows))


@needs_kernels
def test_4_bits_lose_less_where_tokens_say_which_inputs_matter() -> None:
    model = uneven_model()
    first, second = tokens_of(model.config), tokens_of(model.config).flip(1)
    rows = [Row(slot, tokens) for slot, tokens in enumerate(second.tolist())]
    exact = torch.cat(support.torch_bench(model).run(rows))
    plain, calibrated = (float((logits_in_4_bits(ids, rows) - exact).norm()) for ids in (None, first))
    assert calibrated < 0.8 * plain


@needs_kernels
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_weights_that_are_read_late_are_rounded_alike(tmp_path: Path, is_tied: bool) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=is_tied, hidden_size=64, num_attention_heads=2, head_dim=32)
    checkpoint = open_checkpoint(str(tmp_path))
    ids = torch.arange(60).view(NUM_SEQUENCES, -1)
    logits = []
    for reads_late in (False, True):
        model = load_model(checkpoint, DType.BFLOAT16, "cpu", SLOT_LEN, reads_late=reads_late)
        forward = CpuDecoder(model, SLOT_LEN, widths=widths_for(Quantization.INT4, 1), calibration_ids=ids)
        logits.append(Bench(checkpoint.config, torch.bfloat16, forward).run([Row(0, [1, 2, 3])])[0])
    assert torch.equal(*logits)


def test_the_same_tokens_are_drawn_each_time() -> None:
    assert draw_tokens(1000).shape == (4, 64)
    assert torch.equal(draw_tokens(1000), draw_tokens(1000))
    assert 0 <= int(draw_tokens(261).min()) <= int(draw_tokens(261).max()) < 261
