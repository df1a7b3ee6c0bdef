"""Slots are counted from what a GPU has left beside weights and the largest step; its numbers are made up here."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import DType, EngineConfig, ModelFacts, ResolvedConfig
from chairlift.engine.forward import PlainForward, load_forward
from chairlift.engine.memory import fit_cache
from chairlift.errors import ConfigurationError
from chairlift.models import open_checkpoint
from tests.engine.support import make_tiny_checkpoint, resolved_config

GIB = 2**30
FACTS = ModelFacts(  # 64 KiB of float32 cache per token, so that a slot of 64 tokens takes 4 MiB
    DType.FLOAT32, max_position_embeddings=64, num_parameters=0, head_dim=16, kv_elements_per_token=2**14
)


@pytest.fixture
def forward(tmp_path: Path) -> PlainForward:
    """A model on the CPU, which stands for one on a GPU."""
    loaded = load_forward(open_checkpoint(make_tiny_checkpoint(tmp_path)), resolved_config(tmp_path))
    assert isinstance(loaded, PlainForward)
    return loaded


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """1 GiB of weights; a step needs 2 GiB; 10 of 16 GiB are free."""
    numbers = {"weights": GIB, "peak": 3 * GIB, "free": 10 * GIB}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: numbers["weights"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: numbers["peak"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (numbers["free"], 16 * GIB))
    return numbers


def fitted(forward: PlainForward, asked: EngineConfig, **resolved: Any) -> ResolvedConfig:
    fields = {"device": "cuda:0", "max_batch_size": 4096, "max_num_batched_tokens": 4096, **resolved}
    return fit_cache(asked, resolved_config("model", **fields), FACTS, forward)


@pytest.mark.usefixtures("gpu")
def test_slots_take_their_share_of_what_weights_and_a_step_leave(forward: PlainForward) -> None:
    assert fitted(forward, EngineConfig(memory_fraction=0.5)).max_batch_size == 1024  # (10 - 2) GiB / 2 / 4 MiB


@pytest.mark.usefixtures("gpu")
def test_slots_that_were_asked_for_and_do_not_fit_are_refused(forward: PlainForward) -> None:
    with pytest.raises(ConfigurationError, match=r"80% of the 8\.00 GiB .* lower max_batch_size or max_seq_len"):
        fitted(forward, EngineConfig(max_batch_size=1639))
    assert fitted(forward, EngineConfig(max_batch_size=1638)).max_batch_size == 1638


def test_a_gpu_that_is_too_small_for_one_slot_is_refused(forward: PlainForward, gpu: dict[str, int]) -> None:
    gpu["free"] = 2 * GIB + 2**20
    with pytest.raises(ConfigurationError, match=r"no room for 1 slot of 64 tokens: .* lower max_seq_len$"):
        fitted(forward, EngineConfig())


@pytest.mark.usefixtures("gpu")
def test_the_numbers_are_logged(forward: PlainForward, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.engine.memory")
    fitted(forward, EngineConfig())
    assert caplog.messages == [
        "cuda:0: 10.00 of 16.00 GiB are free beside 1.00 GiB of weights; a step of 4096 tokens needs 2.00 GiB of them",
        "1638 slots of 64 tokens: 80% of that for a cache of 6.40 GiB",
    ]


@pytest.mark.usefixtures("gpu")
def test_a_step_that_does_not_fit_beside_the_weights_says_what_to_lower(
    forward: PlainForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(_tokens: int, _rows: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(forward, "rehearse", run_out)
    with pytest.raises(ConfigurationError) as caught:
        fitted(forward, EngineConfig())
    assert str(caught.value) == (
        "cuda:0 ran out of memory in a step of 4096 tokens beside 1.00 GiB of weights; lower max_num_batched_tokens"
    )


def test_on_a_cpu_nothing_changes(forward: PlainForward) -> None:
    resolved = resolved_config("model")
    assert fit_cache(EngineConfig(), resolved, FACTS, forward) is resolved


def test_a_rehearsal_needs_no_cache(forward: PlainForward) -> None:
    forward.rehearse(num_tokens=200, num_rows=3)  # more tokens than the model has positions
