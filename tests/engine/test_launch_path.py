"""The whole way of a launch on a device that has no numbers: nothing waits for it, and all copies are as they must be.

Torch's meta device stands for a GPU, and kernels that it lacks for shapes alone; schedulers, grammars, the sampler and
the recording of graphs are the real ones.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import varlen

from chairlift import LLM
from chairlift.config import DType
from chairlift.engine.execution.recorder import Replay
from chairlift.engine.execution.resolver import MachineFacts
from chairlift.engine.parts import Pacing, Parts
from chairlift.models import grouped_experts
from chairlift.models.attention import Backend, Forward, PaddedForward
from chairlift.models.attention.flash import FlashAttn3Backend, FlashAttnBackend, TorchVarlenBackend
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.attention.triton import TritonBackend
from chairlift.models.config import ModelShape
from chairlift.params import RequestOutput, StructuredOutputs
from tests.engine.support import GREEDY, PROMPTS, Recorder, core_of, mixed_of
from tests.engine.test_overlap import CASES
from tests.engine.test_recurrent import IN_TORCH, TINY
from tests.engine.tokenizers_made import make_byte_tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import WrappedForward, make_core, with_attention
from tests.support.flash_attn_reference import module
from tests.support.meta_device import META, DeviceWatch

if TYPE_CHECKING:
    from chairlift.kernels.grouped import StoredMatrix
    from chairlift.kernels.ragged import LayerStates, RaggedRows

TOLD = ord("a")  # each token that comes from the device
ALONE = "greedy", "random", "filtered", "penalised", "biased", "scored", "without words", "structured"
BACKENDS: dict[str, Callable[[ModelShape], Backend]] = {
    "torch_copied": lambda model: TorchBackend(model.attention, is_in_place=False),
    "torch_varlen": lambda model: TorchVarlenBackend(model.attention),
    "flash_attn": lambda model: FlashAttnBackend(model.attention),
    "flash_attn_3": lambda model: FlashAttn3Backend(model.attention),
    "triton": lambda model: TritonBackend(model.attention),
}


class WatchedRecorder(Recorder):
    """A watch sees what is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = DeviceWatch(TOLD)

    def record(self, work: Callable[[], None]) -> Replay:
        with self.watch, self.watch.recording():
            return super().record(work)


class Unmeasured(WrappedForward):
    """A forward that has no dummy run, because the memory of a step cannot be measured there."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        assert isinstance(forward, PaddedForward)
        self.can_pad = forward.can_pad
        self.new_hidden, self.padded_hidden = forward.new_hidden, forward.padded_hidden


@pytest.fixture
def recorder() -> WatchedRecorder:
    return WatchedRecorder()


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Kernels of attention give tensors of the right shapes."""

    def first_of(*args: Any, **_: Any) -> Any:
        return torch.empty_like(args[0])

    functions = dict.fromkeys(("flash_attn_with_kvcache", "flash_attn_varlen_func"), first_of)
    modules = module("flash_attn", functions), module("flash_attn_interface", functions)
    with modules[0], modules[1], pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", first_of)
        patch.setattr("chairlift.kernels.decode_attention.plan_chunks", lambda *_: None)
        patch.setattr("chairlift.kernels.slot_append.append", lambda *_: None)
        for family in ("decode_attention", "prefill_attention"):
            patch.setattr(f"chairlift.kernels.{family}.attend", first_of)
        yield


@pytest.fixture
def make(tiny: str, recorder: WatchedRecorder) -> Callable[..., LLM]:
    """Engines on the device, one launch ahead, with graphs of four rows only."""

    def make_with(backend: str, *, has_graphs: bool, model: str = tiny) -> LLM:
        load = with_attention(BACKENDS[backend])
        parts = Parts(
            machine=MachineFacts("meta", frozenset(DType), free_bytes=2**30),
            load_forward=lambda *given: Unmeasured(load(*given)),
            pacing=Pacing(1, recorder if has_graphs else None, records_common=False),
        )
        settings: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 16, "max_steps_per_launch": 3}
        return LLM.of(make_core(model, parts, dtype="bfloat16", device="cuda", attention_backend="torch", **settings))

    return make_with


def assert_told(outputs: list[RequestOutput]) -> None:
    choices = [choice for output in outputs for choice in output.outputs]
    assert all(choice.error is None for choice in choices)
    assert {token for choice in choices for token in choice.token_ids} <= {TOLD}


@pytest.mark.parametrize("has_graphs", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["graphs", "operators"])
def test_nothing_waits_for_the_device(make: Callable[..., LLM], recorder: WatchedRecorder, has_graphs: bool) -> None:
    cases = {**CASES, "structured": {"structured_outputs": StructuredOutputs(regex="a{40}")}}
    params = [GREEDY.model_copy(update={"max_tokens": 4, **fields}) for fields in cases.values()]
    with make("torch_copied", has_graphs=has_graphs) as llm, recorder.watch as watch:
        assert core_of(llm).cache.blocks[0].device == META
        assert_told(llm.generate((PROMPTS[:2] * len(params))[: len(params)], params))
        for case in ALONE:  # so there are launches of several steps, and of graphs that sample
            assert_told(llm.generate(PROMPTS[:1], GREEDY.model_copy(update={"max_tokens": 3, **cases[case]})))
        core_of(llm).check()
    assert (watch.num_sent > 0, watch.num_brought > 0, recorder.num_replayed > 0) == (True, True, has_graphs)


@pytest.mark.parametrize("backend", ["torch_varlen", "flash_attn", "flash_attn_3", "triton"])
def test_nor_does_any_backend_of_attention(make: Callable[..., LLM], recorder: WatchedRecorder, backend: str) -> None:
    params = [GREEDY.model_copy(update={"max_tokens": each}) for each in (2, 4, 4, 4, 4)]
    with make(backend, has_graphs=True) as llm, recorder.watch:  # prompts alone, beside rows that decode, and none
        assert_told(llm.generate([PROMPTS[0], PROMPTS[6], PROMPTS[1], PROMPTS[2], PROMPTS[1]], params))


@pytest.fixture
def recurrent_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of recurrent layers give tensors of the right shapes."""
    # Not before all tests are collected, since those of kernels choose the interpreter.
    from chairlift.kernels import causal_conv, gated_delta_rule

    def convolve(
        rows: "RaggedRows", states: "LayerStates", inputs: torch.Tensor, weights: torch.Tensor, *_: Any, **given: Any
    ) -> torch.Tensor:
        num_replayed = len(rows.table) * states.pending.shape[1] if given["is_replayed"] else 0
        return torch.empty(len(inputs) + num_replayed, len(weights), device=META)

    def advance(*given: Any, **_: Any) -> torch.Tensor:
        rows, heads = given[0], given[-1]
        return torch.empty(len(rows.row_of), heads.num_value_heads * heads.value_dim, device=META)

    monkeypatch.setattr(causal_conv, "convolve", convolve)
    monkeypatch.setattr(causal_conv, "settle", lambda *_: None)
    monkeypatch.setattr(gated_delta_rule, "advance", advance)


@pytest.mark.usefixtures("recurrent_kernels")
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("qwen3_5_text", "torch_copied"),
        ("qwen3_5_text", "triton"),
        pytest.param("lfm2", "torch_copied", marks=pytest.mark.slow),
    ],
)
def test_nor_do_recurrent_layers(
    make: Callable[..., LLM], recorder: WatchedRecorder, tmp_path: Path, family: str, backend: str
) -> None:
    make_checkpoint(tmp_path, model_type=family, **{**TINY, **IN_TORCH[family]})
    make_byte_tokenizer(tmp_path)
    cases: list[dict[str, Any]] = [
        {},
        {"structured_outputs": StructuredOutputs(regex="a{40}")},
        {"n": 2},
        {},
        {"prompt_logprobs": 1},
    ]
    params = [GREEDY.model_copy(update={"max_tokens": 4, **case}) for case in cases]
    with make(backend, has_graphs=True, model=str(tmp_path)) as llm, recorder.watch:
        assert (mixed_of(llm) is not None) == (backend == "triton")
        for _ in range(2):  # the second time with states that were kept
            assert_told(llm.generate(PROMPTS[: len(params)], params))
        assert_told(llm.generate(PROMPTS[:1], GREEDY))
        core_of(llm).check()
    assert recorder.num_replayed > 0


@pytest.mark.parametrize("is_torchs", [True, False])
def test_nor_do_experts(
    make: Callable[..., LLM],
    recorder: WatchedRecorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_torchs: bool,
) -> None:
    from chairlift.kernels import expert_rows  # as above

    def multiply(x: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), weights.shape[1])

    def multiply_stored(x: torch.Tensor, matrices: "StoredMatrix", ends: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), matrices.num_outputs // len(ends))

    if is_torchs:
        monkeypatch.setattr(grouped_experts, "multiply", multiply)
    else:
        monkeypatch.setattr(grouped_experts, "suits", lambda *_: False)
        monkeypatch.setattr(expert_rows, "multiply", multiply_stored)
    sizes: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    make_checkpoint(tmp_path, model_type="qwen3_moe", **sizes)
    with make("torch_varlen", has_graphs=True, model=str(tmp_path)) as llm, recorder.watch:
        assert mixed_of(llm) is not None
        assert_told(llm.generate(PROMPTS[:5], GREEDY.model_copy(update={"max_tokens": 3})))
    assert recorder.num_replayed > 0


@pytest.mark.parametrize("backend", ["torch_varlen", "flash_attn", "flash_attn_3"])
def test_steps_with_prompts_are_recorded_and_take_one_copy_of_numbers(
    make: Callable[..., LLM], recorder: WatchedRecorder, backend: str
) -> None:
    with make(backend, has_graphs=True) as llm, recorder.watch as watch:
        mixed = mixed_of(llm)
        assert mixed is not None
        assert mixed.graphs.recorded == {(16, 0), (16, 4)}
        num_sent, num_replayed = watch.num_sent, recorder.num_replayed
        assert_told(llm.generate(PROMPTS[:1], GREEDY.model_copy(update={"max_tokens": 1})))
        assert (watch.num_sent - num_sent, recorder.num_replayed - num_replayed) == (1, 2)  # the step, and sampling
