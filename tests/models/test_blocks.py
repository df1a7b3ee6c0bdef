"""Layers that differ in every field of their blocks: over the cache they compute what they do without one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.functional import scaled_dot_product_attention

from chairlift.cache import KVCacheParams
from chairlift.config import AttentionBackend, DType
from chairlift.models import (
    Checkpoint,
    InvariantForward,
    PiecewiseForward,
    TorchForward,
    load_backend,
    load_model,
)
from chairlift.models.attention import Forward, Projections
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.blocks import Activation, AttentionBlock, DenseMLPBlock, QKNorm
from chairlift.models.decoder import Decoder
from chairlift.models.parallel import CheckpointPart, Group, find_split_obstacle
from chairlift.models.rotary import RopeConfig
from tests.models.cpu.support import BASE, make_model
from tests.support.checkpoints import random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row, in_pieces

NEAR, FAR = RopeConfig(10_000.0), RopeConfig(1_000_000.0)
WIDE = AttentionBlock(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=NEAR, window=7)
NARROW = AttentionBlock(num_heads=2, num_kv_heads=2, head_dim=32, scale=0.2, rope=FAR, qk_norm=QKNorm.ALL_HEADS)
MANY = AttentionBlock(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.3, softcap=2.0, has_qkv_bias=True)
SILU = DenseMLPBlock(intermediate_size=96)
GELU = DenseMLPBlock(intermediate_size=40, activation=Activation.GELU_TANH, has_bias=True)
LAYERS = ((WIDE, SILU), (NARROW, GELU), (WIDE, GELU), (GELU,), (MANY, SILU))  # one of them does not attend
MIXED = replace(BASE, layers=LAYERS, hidden_size=64, vocab_size=320)
LENGTHS = (40, 23)


def computed_whole(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits `[T, vocab]` of a sequence in one go, without a cache: each query attends to the keys of the same pass."""

    def attend(layer_idx: int, new: Projections) -> torch.Tensor:
        assert new.own is not None
        query, (key, value) = new.query, new.own
        config, num_groups = model.config.attention[layer_idx], query.shape[1] // key.shape[1]
        ages = torch.arange(len(query))[:, None] - torch.arange(len(query))
        is_seen = (ages >= 0) & (ages < (config.window or len(query)))
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        key, value = key.repeat_interleave(num_groups, dim=0), value.repeat_interleave(num_groups, dim=0)
        if config.softcap is None:
            attended = scaled_dot_product_attention(query, key, value, is_seen, scale=config.scale)
        else:
            scores = config.softcap * torch.tanh(query @ key.transpose(1, 2) * config.scale / config.softcap)
            attended = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1) @ value
        return attended.transpose(0, 1)

    with torch.inference_mode():
        return model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), attend))


def computed_in_steps(model: Decoder, forward: Forward, first: list[int], second: list[int]) -> list[torch.Tensor]:
    """The same over slots of a cache: a prompt in two chunks, beside it another one, then both decode."""
    bench = Bench(model.config, model.dtype, forward)
    logits: list[list[torch.Tensor]] = [[], []]
    logits[0] += bench.run([Row(3, first[:11])])
    logits[0] += bench.run([Row(3, first[11:20])])
    for place, row in zip((0, 1), bench.run([Row(3, first[20:21]), Row(1, second[:6])]), strict=True):
        logits[place].append(row)
    for step in range(6, len(second)):
        for place, row in zip((0, 1), bench.run([Row(3, [first[step + 15]]), Row(1, [second[step]])]), strict=True):
            logits[place].append(row)
    logits[0] += [bench.run([Row(3, [token])])[0] for token in first[len(second) + 15 :]]
    return [torch.cat(each) for each in logits]


@pytest.mark.parametrize("kind", ["in place", "copied", "alone"])
def test_layers_that_differ_compute_over_the_cache_what_they_do_without_one(kind: str) -> None:
    model = make_model(MIXED)
    first, second = random_prompts(6, list(LENGTHS), MIXED.vocab_size)
    forward: Forward = InvariantForward(model)
    if kind != "alone":
        forward = TorchForward(model, TorchBackend(MIXED.attention, is_in_place=kind == "in place"))
    for ours, tokens in zip(computed_in_steps(model, forward, first, second), (first, second), strict=True):
        whole = computed_whole(model, tokens)
        assert whole.std() > 0.1  # or else there would be nothing to compare
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-4)


def test_what_a_slot_keeps_is_what_each_layer_declares() -> None:
    wide, narrow = KVCacheParams(torch.bfloat16, 2, 16), KVCacheParams(torch.bfloat16, 2, 32)
    assert MIXED.kept(DType.BFLOAT16) == [wide, narrow, wide, None, wide]
    assert MIXED.token_bytes(DType.BFLOAT16) == 3 * 2 * 2 * 16 * 2 + 2 * 2 * 32 * 2
    assert MIXED.table_bytes == 8 * 16 + 8 * 32  # two rotary tables, for heads of two sizes
    assert MIXED.describe() == (
        "LlamaForCausalLM: 5 layers, 4/2 heads of 16 and 2/2 heads of 32 and 6/2 heads of 16, vocabulary 320,"
        " rope default, window 7 in 2 layers"
    )


def test_cuda_graphs_and_ragged_kernels_are_for_layers_that_keep_the_same() -> None:
    assert BASE.can_record
    assert not MIXED.can_record
    uncapped = replace(MIXED, layers=LAYERS[:3])
    backend = load_backend(AttentionBackend.TORCH, uncapped, torch.bfloat16, torch.device("cuda"))
    assert isinstance(backend, TorchBackend)


# In pieces


@pytest.mark.parametrize("counts", [(5,), (1, 1, 1, 1, 1), (2, 0, 3)])
def test_layers_some_at_a_time_give_the_bits_of_all_at_once(counts: tuple[int, ...]) -> None:
    model = make_model(MIXED, torch.bfloat16)
    first, second = random_prompts(6, list(LENGTHS), MIXED.vocab_size)
    forward = PiecewiseForward(model, TorchBackend(MIXED.attention))
    whole = computed_in_steps(model, forward, first, second)
    parts = computed_in_steps(model, in_pieces(forward, counts), first, second)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, whole, strict=True))


@pytest.mark.parametrize(("first_layer", "count"), [(-1, 2), (0, 6), (5, 1), (3, -1)])
def test_layers_that_there_are_not_cannot_be_run(first_layer: int, count: int) -> None:
    model = make_model(MIXED)
    stream, now = model.enter(torch.tensor([1, 2]), model.look_up(torch.arange(2), lambda *_: torch.empty(0)))
    with pytest.raises(IndexError, match=rf"{count} layers from {first_layer} on are not in \[0, 5\)"):
        model.run(stream, now, first_layer, count)


# In files, and over ranks


def save(model: Decoder, directory: Path) -> Checkpoint:
    """Writes the model as a checkpoint has it, each tensor by itself."""
    tensors = {}
    parameters = dict(model.named_parameters())
    for weight in model.config.weights():
        for leaf in ("weight", "bias"):
            if (stacked := parameters.get(f"{weight.module}.{leaf}")) is None:
                continue
            lengths = [part.length for part in weight.parts] if len(weight.parts) > 1 else [len(stacked)]
            for part, rows in zip(weight.parts, torch.split(stacked, lengths), strict=True):
                tensors[f"{part.name}.{leaf}"] = rows.detach().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(directory, model.config)


def test_layers_that_differ_are_read_by_the_names_of_their_blocks(tmp_path: Path) -> None:
    model = make_model(MIXED)
    read = load_model(save(model, tmp_path), DType.FLOAT32, "cpu", SLOT_LEN)
    expected = dict(model.named_parameters())
    assert {name for name, _ in read.named_parameters()} == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in read.named_parameters())


def test_ranks_compute_layers_that_differ_together(tmp_path: Path) -> None:
    model = make_model(MIXED)
    checkpoint = save(model, tmp_path)
    first, second = random_prompts(6, list(LENGTHS), MIXED.vocab_size)
    store = HashStore()

    def run(rank: int) -> list[torch.Tensor]:
        part = CheckpointPart.of(checkpoint, Group(rank, 2, store, torch.device("cpu"), timedelta(seconds=60)))
        own = load_model(part, DType.FLOAT32, "cpu", SLOT_LEN)
        part.connect(own)
        return computed_in_steps(own, TorchForward(own, TorchBackend(own.config.attention)), first, second)

    with ThreadPoolExecutor(2) as threads:
        parts = list(threads.map(run, range(2)))
    for place, tokens in enumerate((first, second)):
        assert torch.equal(parts[0][place], parts[1][place])
        torch.testing.assert_close(parts[0][place], computed_whole(model, tokens), rtol=1e-4, atol=1e-4)


def test_a_single_layer_can_keep_a_model_from_being_divided(tmp_path: Path) -> None:
    assert find_split_obstacle(Checkpoint(tmp_path, MIXED), 2) is None
    odd = replace(MIXED, layers=(*LAYERS, (replace(WIDE, num_heads=3, num_kv_heads=3), SILU)))
    assert find_split_obstacle(Checkpoint(tmp_path, odd), 2) == "its 3 attention heads cannot be divided by that"
