"""Facts about the machine, devices that it does not have, and the slots that a GPU has room for beside a model."""

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from chairlift.config import AttentionBackend, DType, EngineConfig, ResolvedConfig
from chairlift.engine.execution import machine
from chairlift.engine.execution.machine import choose_num_threads, fit_cache, inspect_machine
from chairlift.engine.sampling.drawing import DrawKind
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplingBatch
from chairlift.errors import ConfigurationError
from chairlift.models import TorchForward, load_forward, open_checkpoint
from tests.engine.support import make_tiny_checkpoint, resolved_config
from tests.models.cpu.support import BASE
from tests.support.shapes import positions_of, varied

GIB = 2**30
SHAPE = varied(BASE, positions_of(BASE) * 8, num_kv_heads=8, head_dim=64)  # 64 KiB of float32 cache a token


def test_a_cpu_has_float32_and_free_memory() -> None:
    facts = inspect_machine("cpu")
    assert (facts.device, facts.is_gpu, facts.has_elastic_memory) == ("cpu", False, sys.platform == "linux")
    assert DType.FLOAT32 in facts.fast_dtypes
    assert facts.free_bytes > 2**20
    assert inspect_machine("auto").device == ("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("limit", "free_bytes"), [("max\n", 9 * GIB), ("4294967296\n", 3 * GIB), ("100\n", 0)])
def test_what_is_free_in_a_container_is_what_its_limit_leaves(
    limit: str, free_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limit").write_text(limit)
    (tmp_path / "usage").write_text(f"{GIB}\n")
    files = ((tmp_path / "limit", tmp_path / "usage"), (tmp_path / "none", tmp_path / "none"))
    monkeypatch.setattr(machine, "_CGROUP_FILES", files)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9 * GIB))
    assert inspect_machine("cpu").free_bytes == free_bytes


NO_KIND = "device '{}' .*choose cpu or cuda:0"
NOT_THERE = f"{{}}.* {torch.cuda.device_count()} CUDA devices"  # from 128 on torch itself cannot hold it


@pytest.mark.parametrize(
    ("device", "said"),
    [
        *((device, NO_KIND) for device in ("tpu", "mps", "meta", "", "cuda:x", "cuda:-1")),
        *((f"cuda:{index}", NOT_THERE) for index in (99, 127, 128, 256, 1000)),
    ],
)
def test_a_device_that_is_not_supported_or_not_there_is_refused_by_name(device: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.format(device)):
        inspect_machine(device)


@pytest.mark.parametrize(
    ("capability", "dtypes"), [((9, 0), set(DType)), ((7, 5), {DType.FLOAT32, DType.FLOAT16})], ids=["new", "old"]
)
def test_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtypes: set[DType]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    facts = inspect_machine("cuda:1")
    assert (facts.device, facts.free_bytes, set(facts.fast_dtypes)) == ("cuda:1", 80 * GIB, dtypes)


def v1(directory: str, quota: int) -> dict[str, str]:
    return {f"cpu/{directory}cpu.cfs_quota_us": f"{quota}\n", f"cpu/{directory}cpu.cfs_period_us": "100000\n"}


V1 = "4:memory:/docker/f00\n3:cpu,cpuacct:/docker/f00\n"
SIBLINGS = {"a/cpu.max": "600000 100000\n", "a/b/cpu.max": "500000 100000\n", "c/cpu.max": "1 1\n"}


@pytest.mark.parametrize(
    ("num_cores", "num_usable", "own", "files", "num_threads"),
    [
        # Without such files, as on another system.
        *((4, 8, None, {}, 4), (4, 2, None, {}, 2), (1, 2, None, {}, 1), (64, 64, None, {}, 64)),
        (None, 3, None, {}, 3),
        # No more than a container has time for.
        (8, 8, "0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        (8, 8, "0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        (8, 8, "0::/\n", {"cpu.max": "max 100000\n"}, 8),
        (8, 8, "0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        (8, 8, "0::/a/b\n", SIBLINGS, 5),
        (8, 8, V1, v1("", 300_000), 3),
        (8, 8, V1, v1("docker/f00/", 400_000), 4),
        (8, 8, V1, v1("", -1), 8),
        (8, 8, "0::/somewhere/else\n", {"cpu.max": "200000 100000\n"}, 2),
        (8, 8, "", {}, 8),
    ],
)
def test_as_many_threads_as_physical_cores_that_may_be_used(
    num_cores: int | None, num_usable: int, own: str | None, files: dict[str, str], num_threads: int, tmp_path: Path
) -> None:
    def count(logical: bool) -> int | None:
        assert not logical
        return num_cores

    for name, text in ({} if own is None else {**files, "own": own}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
        patch.setattr(machine, "_CGROUP", tmp_path)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setattr(psutil, "cpu_count", count)
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(num_usable)))
        assert choose_num_threads() == num_threads


def test_as_many_threads_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")  # the second is of nested regions
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)  # what an earlier engine set
    assert choose_num_threads() == 3


# What is left beside a loaded model; a GPU's numbers are made up here


@pytest.fixture
def forward(tmp_path: Path) -> TorchForward:
    """A model on the CPU, which stands for one on a GPU."""
    loaded = load_forward(open_checkpoint(make_tiny_checkpoint(tmp_path)), resolved_config(tmp_path))
    assert isinstance(loaded, TorchForward)
    return loaded


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """1 GiB of weights; a step needs 2 GiB; 10 of 16 GiB are free."""
    numbers = {"weights": GIB, "peak": 3 * GIB, "free": 10 * GIB}
    monkeypatch.setattr(machine, "on_device", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: numbers["weights"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: numbers["peak"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (numbers["free"], 16 * GIB))
    return numbers


def fitted(forward: TorchForward, **asked: Any) -> ResolvedConfig:
    """In slots of 256 MiB."""
    resolved = resolved_config("model", device="cuda:0", max_batch_size=50, max_seq_len=4096)
    return fit_cache(EngineConfig(**asked), resolved, SHAPE, forward)


@pytest.mark.usefixtures("memory")
def test_slots_take_their_share_of_what_weights_and_a_step_leave(
    forward: TorchForward, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.engine.execution.machine")
    assert fitted(forward).max_batch_size == 25  # 0.8 (10 - 2) GiB / 256 MiB
    assert caplog.messages == [
        "cuda:0: 10.00 GiB of 16.00 GiB are free beside 1.00 GiB of weights; a step of 64 tokens needs 2.00 GiB of"
        " them",
        "25 slots of 4096 tokens: a cache of 6.25 GiB",
    ]
    assert fitted(forward, kv_cache_memory_bytes=4 * GIB).max_batch_size == 16
    assert fitted(forward, max_batch_size=25).max_batch_size == 25
    with pytest.raises(ConfigurationError, match=r"80% of the 8\.00 GiB .* lower max_batch_size or max_seq_len"):
        fitted(forward, max_batch_size=26)


def test_a_gpu_that_is_too_small_for_one_slot_is_refused(forward: TorchForward, memory: dict[str, int]) -> None:
    memory["free"] = 2 * GIB + 2**20
    with pytest.raises(ConfigurationError, match=r"no room for 1 slot of 4096 tokens: .* lower max_seq_len$"):
        fitted(forward)


@pytest.mark.usefixtures("memory")
def test_a_step_that_does_not_fit_beside_the_weights_says_what_to_lower(
    forward: TorchForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(_tokens: int, _rows: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(forward, "rehearse", run_out)
    with pytest.raises(ConfigurationError) as caught:
        fitted(forward)
    assert str(caught.value) == (
        "cuda:0 ran out of memory in a step of 64 tokens beside 1.00 GiB of weights; lower max_num_batched_tokens or"
        " max_batch_size"
    )


def test_on_a_cpu_nothing_changes_where_torch_computes_and_a_rehearsal_needs_no_cache(forward: TorchForward) -> None:
    resolved = resolved_config("model")
    assert fit_cache(EngineConfig(), resolved, SHAPE, forward) is resolved
    assert forward.rehearse(num_tokens=200, num_rows=3).shape == (3, 259)  # more tokens than the model has positions


@pytest.mark.parametrize(("num_step_bytes", "num_bytes"), [(GIB // 2, GIB), (3 * GIB, 0.8 * GIB)])
def test_on_a_cpu_the_cache_leaves_what_a_step_takes(
    native: str, num_step_bytes: int, num_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_forward(open_checkpoint(native), resolved_config(native, attention_backend=AttentionBackend.CPU))
    asked: list[tuple[int, ...]] = []

    def step_bytes(*counts: int) -> int:
        asked.append(counts)
        return num_step_bytes

    monkeypatch.setattr(decoder, "step_bytes", step_bytes)
    monkeypatch.setattr(machine, "_free_memory", lambda: 4 * GIB)
    resolved = resolved_config("model", is_cache_elastic=True, kv_cache_memory_bytes=GIB, cache_tokens=2**14)
    fitted = fit_cache(EngineConfig(), resolved, SHAPE, decoder)
    assert asked == [(64, 4, 2**14)]  # tokens of a step, rows, and tokens in the cache
    assert fitted.kv_cache_memory_bytes == int(num_bytes)
    assert fitted.cache_tokens == int(num_bytes) // 2**16 // 64 * 64


@pytest.mark.usefixtures("memory")
def test_a_rehearsal_samples_all_rows_with_penalties_filters_and_log_probabilities(
    forward: TorchForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def sample(self: Sampler, logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
        assert batch.penalties is not None
        assert batch.draws is not None
        counts = self._penalties._num_generated
        assert counts is not None
        kinds = batch.draws.kind, len(batch.draws.rows), len(batch.penalties.rows), batch.num_top_logprobs
        seen.extend((logits.shape, *kinds, counts.shape))
        return real(self, logits, batch, step)

    real = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", sample)
    fitted(forward)
    assert seen == [(50, 259), DrawKind.TOP, 50, 50, [20] * 50, (50, 259)]
