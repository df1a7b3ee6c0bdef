"""A config.json that claims what cannot be is one line, quickly, whatever it claims."""

import math
import time
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig, LoadFormat
from chairlift.engine.core import EngineCore
from chairlift.errors import ConfigurationError
from chairlift.models import open_checkpoint
from chairlift.models.claims import MAX_LAYERS, MAX_SIZE
from tests.models.support import read_config, refusal, write_config
from tests.support.checkpoints import SMALL, make_checkpoint
from tests.support.gguf_files import Kind, write_model

LIMIT_S = 10.0  # of this thread's processor time, for a refusal; without bounds it takes minutes, or never ends
HUGE = (200_000, 2**31, 2**62, 2**63, 10**30)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
NO_NUMBERS: tuple[Any, ...] = (-1, 0, math.nan, math.inf, -math.inf, "many", [1], {}, True, None, 10**400)
FACTORS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama of 3 layers, and a decoder in transformers' code."""
    shapes: dict[str, dict[str, Any]] = {
        "llama": {},
        "phimoe": {"num_local_experts": 4, "pad_token_id": 0},
        "gpt2": {"pad_token_id": 0},
    }
    directory = tmp_path_factory.mktemp("made")
    for model_type, shape in shapes.items():
        make_checkpoint(directory / model_type, model_type=model_type, **shape)
    return {model_type: directory / model_type for model_type in shapes}


def start(path: str) -> None:
    """An engine, until it is ready."""
    EngineCore(EngineConfig(model=path, max_batch_size=2, max_seq_len=64))


def refused(source: Path, directory: Path, changes: dict[str, Any]) -> str:
    """Returns what an engine says of the checkpoint with these fields changed."""
    for path in source.iterdir():
        (directory / path.name).symlink_to(path)
    fields = read_config(source)
    (directory / "config.json").unlink()
    write_config(directory, fields, changes)
    begin = time.thread_time()
    with pytest.raises(ConfigurationError) as caught:
        start(str(directory))
    assert time.thread_time() - begin < LIMIT_S
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("model_type", ["llama", "phimoe"])
@pytest.mark.parametrize("size", [4, 1000, *HUGE])
def test_more_layers_than_the_weights_have(made: dict[str, Path], tmp_path: Path, model_type: str, size: int) -> None:
    said = refused(made[model_type], tmp_path, {"num_hidden_layers": size})
    if size <= MAX_LAYERS:
        assert said == f"{tmp_path}/config.json: num_hidden_layers is {size}, and the weights have 3 layers"
    else:
        assert said == f"{tmp_path}/config.json: num_hidden_layers must be at most 1024, not {size}"


def test_layers_by_another_name_are_counted_as_well(made: dict[str, Path], tmp_path: Path) -> None:
    said = refused(made["gpt2"], tmp_path, {"n_layer": 900})
    assert said == f"{tmp_path}/config.json: n_layer is 900, and the weights have 3 layers"


@pytest.mark.parametrize("model_type", ["llama", "phimoe"])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [HUGE[0], HUGE[2]])
def test_sizes_that_the_tensors_contradict(
    made: dict[str, Path], tmp_path: Path, model_type: str, name: str, size: int
) -> None:
    said = refused(made[model_type], tmp_path, {name: size})
    assert size <= MAX_SIZE or said == f"{tmp_path}/config.json: {name} must be at most {MAX_SIZE}, not {size}"
    assert "do not fit" not in said


@pytest.mark.parametrize("size", HUGE[1:])
def test_numbers_of_other_parts_are_bounded_wherever_they_are(tmp_path: Path, size: int) -> None:
    inner = {"model_type": "gemma3_text", "num_hidden_layers": size}
    described = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    assert "num_hidden_layers must be at most 1024" in refusal(write_config(tmp_path, described), open_checkpoint)


def test_a_config_alone_is_bounded_too(made: dict[str, Path], tmp_path: Path) -> None:
    path = write_config(tmp_path, read_config(made["llama"]), num_hidden_layers=MAX_LAYERS + 1)
    with pytest.raises(ConfigurationError, match="num_hidden_layers must be at most 1024, not 1025"):
        EngineCore(EngineConfig(model=path, load_format=LoadFormat.DUMMY))


@pytest.mark.parametrize("value", [math.nan, 16.0, True], ids=repr)
def test_a_size_that_transformers_does_not_know_is_a_whole_number(tmp_path: Path, value: object) -> None:
    granite = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
    sizes = {"num_local_experts": 0, "layer_types": ["full_attention"] * 3, "head_dim": value}
    said = refusal(write_config(tmp_path, SMALL, granite, sizes), open_checkpoint)
    assert said.endswith(f"head_dim must be a whole number, not {value!r}")


@pytest.mark.parametrize("value", NO_NUMBERS[:-2], ids=repr)
@pytest.mark.parametrize(
    "name", ["vocab_size", "head_dim", "num_hidden_layers", "max_position_embeddings", "rope_theta"]
)
def test_what_is_no_size_at_all(made: dict[str, Path], tmp_path: Path, name: str, value: object) -> None:
    assert refused(made["llama"], tmp_path, {"rope_parameters": None, name: value})


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, given in FACTORS.items() for name in (*given, "rope_theta", "partial_rotary_factor")],
)
def test_odd_parameters_of_rope(made: dict[str, Path], tmp_path: Path, kind: str, name: str) -> None:
    for number, value in enumerate((*NO_NUMBERS[:-3], NO_NUMBERS[-1], [math.nan] * 8, [1.0] * 7)):
        directory = tmp_path / str(number)
        directory.mkdir()
        write_config(
            directory, read_config(made["llama"]), rope_parameters={"rope_type": kind, **FACTORS[kind], name: value}
        )
        begin = time.thread_time()
        refusal(directory, open_checkpoint)
        assert time.thread_time() - begin < LIMIT_S


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor of its rope must be a number above 0, and 1 at most"),
        ({"rope_theta": -3.0}, "rope_theta of its rope must be a positive number, not -3.0"),
        ({"rope_theta": math.nan}, "rope_theta of its rope must be a positive number, not nan"),
        ({"rope_type": "linear", "factor": 0}, "factor of its rope must be a positive number, not 0"),
        ({"rope_type": "linear", "factor": [2.0]}, "factor of its rope must be a positive number, not [2.0]"),
        (
            {"rope_type": "yarn", **FACTORS["yarn"], "beta_fast": -1},
            "beta_fast of its rope must be a positive",
        ),
        ({"rope_type": "yarn", **FACTORS["yarn"], "rope_theta": 1.0}, "its rope cannot be computed"),
        ({"rope_type": "yarn", **FACTORS["yarn"], "factor": 1e30}, "and 2147483647 are the most"),
        ({"rope_type": "yarn", **FACTORS["yarn"], "factor": 1e300}, "... positions, and 2147483647 are the most"),
        (
            {"rope_type": "longrope", **FACTORS["longrope"], "long_factor": [1.0] * 7},
            "long_factor of its rope must have 8 numbers, not 7",
        ),
        ({"rope_type": ["linear"], "factor": 2.0}, "rope"),
    ],
)
def test_what_is_wrong_with_rope_is_said(
    made: dict[str, Path], tmp_path: Path, rope: dict[str, Any], said: str
) -> None:
    path = write_config(tmp_path, read_config(made["llama"]), rope_parameters={"rope_theta": 10000.0, **rope})
    assert said in refusal(path, open_checkpoint)


@pytest.mark.parametrize(("head_dim", "heads"), [(1, 4), (3, 4)])
def test_heads_that_have_no_pairs(made: dict[str, Path], tmp_path: Path, head_dim: int, heads: int) -> None:
    path = write_config(tmp_path, read_config(made["llama"]), head_dim=head_dim, num_attention_heads=heads)
    assert f"head_dim is {head_dim}" in refusal(path, open_checkpoint)


@pytest.mark.parametrize("count", [4, 200_000, 2**31])
def test_a_gguf_files_layers_are_counted(tmp_path: Path, count: int) -> None:
    reference = make_checkpoint(tmp_path / "source")
    path = write_model(reference, tmp_path / "model.gguf", Kind.F32)
    content = path.read_bytes()
    name = b"llama.block_count"
    place = content.index(name) + len(name) + 4
    (tmp_path / "model.gguf").write_bytes(content[:place] + count.to_bytes(4, "little") + content[place + 4 :])
    begin = time.thread_time()
    message = refusal(path, open_checkpoint)
    assert time.thread_time() - begin < LIMIT_S
    assert "3 layers, and its metadata say" in message or "block_count must be a number from 1" in message


def test_a_long_context_takes_no_more_memory_than_there_is(made: dict[str, Path], tmp_path: Path) -> None:
    for path in made["llama"].iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    write_config(tmp_path, read_config(made["llama"]), max_position_embeddings=2**31 - 1)
    core = EngineCore(EngineConfig(model=str(tmp_path), max_batch_size=2, kv_cache_memory_bytes=2**22))
    assert core.config.max_seq_len <= 2**22 // (3 * 2 * 2 * 16 * 4)
