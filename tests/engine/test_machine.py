"""Facts about the machine, devices that it does not have, and the slots that a GPU has room for beside a model."""

import logging
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import DType, EngineConfig, ResolvedConfig
from chairlift.engine.execution.gpus import Gpu, GpuMemory
from chairlift.engine.execution.host import Host
from chairlift.engine.execution.machine import fit_cache, inspect_machine
from chairlift.engine.sampling.drawing import DrawKind
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplingBatch
from chairlift.errors import ConfigurationError
from chairlift.models import TorchForward, load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.decoder import Decoder
from tests.engine.support import make_tiny_checkpoint, resolved_config
from tests.models.cpu.support import BASE
from tests.support.engines import WrappedForward
from tests.support.shapes import positions_of, varied

GIB = 2**30
SHAPE = varied(BASE, positions_of(BASE) * 8, num_kv_heads=8, head_dim=64)  # 64 KiB of float32 cache a token


class OtherHost(Host):
    """A host with so many cores and bytes, and the control groups that files describe."""

    def __init__(self, root: Path, num_cores: int | None = 1, num_usable: int = 1, available: int = 9 * GIB) -> None:
        super().__init__(root)
        self._cores, self._usable, self._available = num_cores, num_usable, available

    def _available_bytes(self) -> int:
        return self._available

    def _num_physical(self) -> int | None:
        return self._cores

    def _num_usable(self) -> int:
        return self._usable


class OtherGpu(Gpu):
    """A GPU with 16 GiB, of which the weights have 1 GiB; a step needs 2 GiB."""

    def __init__(self, free: int = 10 * GIB, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__(0)
        self._free, self._capability = free, capability

    def capability(self) -> tuple[int, int]:
        return self._capability

    def runs_compiled_kernels(self) -> bool:
        return True

    def memory(self) -> GpuMemory:
        return GpuMemory(self._free, 16 * GIB)

    def begin_measuring(self) -> int:
        return GIB

    def end_measuring(self) -> int:
        return 3 * GIB

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_cpu_has_float32_and_free_memory() -> None:
    facts = inspect_machine("cpu")
    assert (facts.device, facts.is_gpu, facts.has_elastic_memory) == ("cpu", False, sys.platform == "linux")
    assert DType.FLOAT32 in facts.fast_dtypes
    assert facts.free_bytes > 2**20
    assert inspect_machine("auto").device == ("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("limit", "free_bytes"), [("max\n", 9 * GIB), ("4294967296\n", 3 * GIB), ("100\n", 0)])
def test_what_is_free_in_a_container_is_what_its_limit_leaves(limit: str, free_bytes: int, tmp_path: Path) -> None:
    write_files(tmp_path / "sys/fs/cgroup", {"memory.max": limit, "memory.current": f"{GIB}\n"})
    assert inspect_machine("cpu", OtherHost(tmp_path)).free_bytes == free_bytes


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
def test_a_gpu(capability: tuple[int, int], dtypes: set[DType]) -> None:
    facts = inspect_machine("cuda:1", gpus=[OtherGpu(), OtherGpu(free=80 * GIB, capability=capability)])
    assert (facts.device, facts.free_bytes, set(facts.fast_dtypes)) == ("cuda:1", 80 * GIB, dtypes)
    assert facts.has_own_kernels == (DType.BFLOAT16 in dtypes)


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
    write_files(tmp_path / "sys/fs/cgroup", files)
    if own is not None:
        write_files(tmp_path / "proc/self", {"cgroup": own})
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        assert OtherHost(tmp_path, num_cores, num_usable).choose_num_threads() == num_threads


def test_as_many_threads_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")  # the second is of nested regions
    assert OtherHost(Path("/nowhere"), 5, 5).choose_num_threads() == 3


# What is left beside a loaded model; a GPU's numbers are made up here


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    """A model on the CPU, which stands for one on a GPU."""
    return load_model(open_checkpoint(make_tiny_checkpoint(tmp_path)), DType.FLOAT32, "cpu", 64, 64)


@pytest.fixture
def forward(model: Decoder) -> TorchForward:
    return TorchForward(model, TorchBackend(model.config.attention))


def fitted(forward: TorchForward, free: int = 10 * GIB, **asked: Any) -> ResolvedConfig:
    """In slots of 256 MiB."""
    resolved = resolved_config("model", device="cuda:0", max_batch_size=50, max_seq_len=4096)
    return fit_cache(EngineConfig(**asked), resolved, SHAPE, forward, gpu=OtherGpu(free))


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


def test_graphs_of_steps_with_prompts_keep_memory_besides(
    forward: TorchForward, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="chairlift.engine.execution.machine")
    resolved = resolved_config("model", device="cuda:0", max_batch_size=50, max_seq_len=4096)
    fitting = fit_cache(EngineConfig(), resolved, SHAPE, forward, gpu=OtherGpu(), num_recorded_tokens=64)
    assert fitting.max_batch_size == 19  # 0.8 (10 - 2 - 2) GiB / 256 MiB
    assert "graphs of steps of up to 64 tokens keep 2.00 GiB" in caplog.messages
    assert fitted(forward, kv_cache_memory_bytes=4 * GIB).max_batch_size == 16
    assert fitted(forward, max_batch_size=25).max_batch_size == 25
    with pytest.raises(ConfigurationError, match=r"80% of the 8\.00 GiB .* lower max_batch_size or max_seq_len"):
        fitted(forward, max_batch_size=26)


def test_a_gpu_that_is_too_small_for_one_slot_is_refused(forward: TorchForward) -> None:
    with pytest.raises(ConfigurationError, match=r"no room for 1 slot of 4096 tokens: .* lower max_seq_len$"):
        fitted(forward, free=2 * GIB + 2**20)


class ExhaustedForward(TorchForward):
    def dummy_run(self, num_tokens: int, num_rows: int) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"CUDA out of memory for {num_tokens} tokens of {num_rows} rows")


def test_a_step_that_does_not_fit_beside_the_weights_says_what_to_lower(model: Decoder) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fitted(ExhaustedForward(model, TorchBackend(model.config.attention)))
    assert str(caught.value) == (
        "cuda:0 ran out of memory in a step of 64 tokens beside 1.00 GiB of weights; lower max_num_batched_tokens or"
        " max_batch_size"
    )


def test_on_a_cpu_nothing_changes_where_torch_computes_and_a_dummy_run_needs_no_cache(forward: TorchForward) -> None:
    resolved = resolved_config("model")
    assert fit_cache(EngineConfig(), resolved, SHAPE, forward) is resolved
    assert forward.dummy_run(num_tokens=200, num_rows=3).shape == (3, 259)  # more tokens than the model has positions


@pytest.mark.parametrize(("num_step_bytes", "num_bytes"), [(GIB // 2, GIB), (3 * GIB, 0.8 * GIB)])
def test_on_a_cpu_the_cache_leaves_what_a_step_takes(
    forward: TorchForward, num_step_bytes: int, num_bytes: float
) -> None:
    asked: list[tuple[int, ...]] = []

    class SizedForward(WrappedForward):
        def step_bytes(self, *counts: int) -> int:
            asked.append(counts)
            return num_step_bytes

    resolved = resolved_config("model", is_cache_elastic=True, kv_cache_memory_bytes=GIB, cache_tokens=2**14)
    host = OtherHost(Path("/nowhere"), available=4 * GIB)
    fitted = fit_cache(EngineConfig(), resolved, SHAPE, SizedForward(forward), host=host)
    assert asked == [(64, 4, 2**14)]  # tokens of a step, rows, and tokens in the cache
    assert fitted.kv_cache_memory_bytes == int(num_bytes)
    assert fitted.cache_tokens == int(num_bytes) // 2**16 // 64 * 64


def test_a_dummy_run_samples_all_rows_with_penalties_filters_and_log_probabilities(forward: TorchForward) -> None:
    seen: list[Any] = []

    class NotingSampler(Sampler):
        def sample(self, logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
            assert batch.penalties is not None
            assert batch.penalties.for_operators is not None
            assert batch.draws is not None
            counts = self._penalties._num_generated
            assert counts is not None
            num_rows = len(batch.draws.rows), len(batch.penalties.for_operators.rows)
            seen.extend((logits.shape, batch.draws.kind, *num_rows, batch.num_top_logprobs, counts.shape))
            return super().sample(logits, batch, step)

    resolved = resolved_config("model", device="cuda:0", max_batch_size=50, max_seq_len=4096)
    fit_cache(EngineConfig(), resolved, SHAPE, forward, gpu=OtherGpu(), make_sampler=NotingSampler)
    assert seen == [(50, 259), DrawKind.TOP, 50, 50, [20] * 50, (50, 259)]
