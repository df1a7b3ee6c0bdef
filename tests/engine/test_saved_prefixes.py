"""Prompts that outlive their engine: the same bits, and less to compute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.errors import ConfigurationError
from chairlift.params import RequestOptions, RequestOutput
from tests.engine.support import core_of, make_llm, make_tiny_checkpoint
from tests.engine.test_poison import choices_of
from tests.engine.test_recurrent import SHAPES, TINY
from tests.engine.tokenizers_made import make_byte_tokenizer
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.kernels import HAS_COMPILER

(PROMPT,) = random_prompts(3, [230], 250)
SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
MINE, YOURS = RequestOptions(cache_salt="mine"), RequestOptions(cache_salt="yours")


@contextmanager
def saving(model: str, directory: Path, **config: Any) -> Iterator[LLM]:
    """An engine that saves its prompts, all of them when it is closed."""
    with make_llm(model, prefix_cache_dir=str(directory), max_seq_len=256, **config) as llm:
        yield llm
        core_of(llm).check()


def ask(llm: LLM, prompt: list[int] = PROMPT, options: RequestOptions = MINE) -> RequestOutput:
    return llm.generate([prompt], SCORED, options=options)[0]


def answered(model: str, directory: Path, prompt: list[int] = PROMPT, **config: Any) -> RequestOutput:
    """The answer of an engine that is made for it alone."""
    with saving(model, directory, **config) as llm:
        return ask(llm, prompt)


def test_a_prompt_is_found_after_a_restart_with_the_same_bits(native: str, tmp_path: Path) -> None:
    cold, warm = (answered(native, tmp_path) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 192)  # whole segments of 64
    assert choices_of([cold]) == choices_of([warm])


def test_a_slot_is_filled_from_memory_first_and_then_from_disk(native: str, tmp_path: Path) -> None:
    cold = answered(native, tmp_path)
    with saving(native, tmp_path) as llm:
        short = ask(llm, [*PROMPT[:100], 7])
        whole = ask(llm)
        assert (short.num_cached_tokens, whole.num_cached_tokens) == (64, 192)
        assert choices_of([whole]) == choices_of([cold])
        snapshot, saved = core_of(llm).read_snapshot(), core_of(llm).read_stats().saved
        assert max(slot.num_restored for slot in snapshot.slots) == 192
        assert (saved.num_reads, saved.num_tokens_read) == (2, 64 + 128 - 36)


def test_a_slot_stays_marked_as_far_as_its_next_request_keeps_what_was_read(native: str, tmp_path: Path) -> None:
    answered(native, tmp_path)
    with saving(native, tmp_path, max_batch_size=1) as llm:
        marks = []
        for prompt in (PROMPT, [*PROMPT[:100], 7], [7] * 50):
            ask(llm, prompt)
            marks.append(core_of(llm).read_snapshot().slots[0].num_restored)
        assert marks == [192, 100, 0]


def test_equal_prompts_are_read_once_and_copied(native: str, tmp_path: Path) -> None:
    cold = answered(native, tmp_path)
    with saving(native, tmp_path) as llm:
        outputs = llm.generate([PROMPT] * 3, SCORED, options=MINE)
        assert [each.num_cached_tokens for each in outputs] == [192, 229, 229]
        assert choices_of(outputs) == choices_of([cold]) * 3
        assert core_of(llm).read_stats().saved.num_reads == 1


def test_another_salt_reads_nothing(native: str, tmp_path: Path) -> None:
    answered(native, tmp_path)
    with saving(native, tmp_path) as llm:
        assert ask(llm, options=YOURS).num_cached_tokens == 0
        assert core_of(llm).read_stats().saved.num_bytes_read == 0


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_what_was_computed_in_another_way_is_not_found(native: str, tmp_path: Path, change: dict[str, Any]) -> None:
    answered(native, tmp_path)
    assert answered(native, tmp_path, **change).num_cached_tokens == 0


def test_another_model_finds_nothing_and_a_copy_of_the_same_one_does(native: str, tmp_path: Path) -> None:
    answered(native, tmp_path / "saved")
    copy, other = tmp_path / "copy", tmp_path / "other"
    copy.mkdir()
    for file in Path(native).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = bytearray((copy / "model.safetensors").read_bytes())
    assert answered(str(copy), tmp_path / "saved").num_cached_tokens == 192
    other.mkdir()
    make_tiny_checkpoint(other, head_dim=32)
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert answered(str(other), tmp_path / "saved").num_cached_tokens == 0


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize("harm", [spoil, Path.unlink])
def test_a_damaged_or_missing_file_ends_what_is_found(
    native: str, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    cold = answered(native, tmp_path)
    with saving(native, tmp_path) as llm:
        second = sorted(tmp_path.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)[-2]
        harm(second)
        warm = ask(llm)
    assert warm.num_cached_tokens == 64
    assert choices_of([warm]) == choices_of([cold])
    assert answered(native, tmp_path).num_cached_tokens == 192  # it was computed and saved again


def test_a_reset_removes_what_was_saved(native: str, tmp_path: Path) -> None:
    answered(native, tmp_path)
    with saving(native, tmp_path) as llm:
        llm.reset_prefix_cache()
        assert ask(llm).num_cached_tokens == 0
        llm.reset_prefix_cache()
    assert list(tmp_path.glob("*/*.kv")) == []


def test_two_engines_share_a_directory(native: str, tmp_path: Path) -> None:
    other_prompt = PROMPT[::-1]
    with saving(native, tmp_path) as first, saving(native, tmp_path) as second:
        outputs = [ask(first), ask(second), ask(first, other_prompt), ask(second, other_prompt)]
    assert [answered(native, tmp_path, each).num_cached_tokens for each in (PROMPT, other_prompt)] == [192, 192]
    assert choices_of([outputs[0], outputs[2]]) == choices_of([outputs[1], outputs[3]])


def test_what_does_not_fit_is_left_out_and_beginnings_stay(native: str, tmp_path: Path) -> None:
    answered(native, tmp_path, prefix_cache_bytes=70_000)  # two segments of 33 kB
    assert answered(native, tmp_path, prefix_cache_bytes=70_000).num_cached_tokens == 128


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_recurrent_states_are_found_after_a_restart(tmp_path: Path, family: str) -> None:
    from chairlift.config import AttentionBackend

    make_checkpoint(
        tmp_path / "model", seed=3, **{**TINY, **SHAPES[AttentionBackend.CPU][family], "model_type": family}
    )
    make_byte_tokenizer(tmp_path / "model")
    model, saved = str(tmp_path / "model"), tmp_path / "saved"
    cold, warm = (answered(model, saved) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens >= 222) == (0, True)  # but for the prompt's tail
    assert choices_of([cold]) == choices_of([warm])
    parted = [*PROMPT[:150], *PROMPT[:60]]
    with make_llm(model, max_seq_len=256, enable_prefix_caching=False) as forgetful:
        expected = forgetful.generate([parted], SCORED)
    assert choices_of([answered(model, saved, parted)]) == choices_of(expected)


def test_a_directory_needs_reuse(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs enable_prefix_caching"):
        make_llm(tiny, prefix_cache_dir=str(tmp_path), enable_prefix_caching=False)


def test_a_directory_that_cannot_be_used_is_no_obstacle(
    native: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert answered(native, tmp_path / "file").num_cached_tokens == 0
    assert sum("cannot be used" in record.message for record in caplog.records) == 1
