"""EngineConfig: what is refused, and that importing it costs nothing."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from chairlift.config import EngineConfig


def test_importing_it_loads_nothing_slow() -> None:
    code = (
        "import chairlift.config, sys; print(sorted({'torch', 'transformers', 'aiohttp', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float8"),
        ("attention_backend", "paged"),
        ("quantization", "int3"),
        ("quantization", "auto"),
        ("load_format", "pickle"),
        ("max_batch_size", 0),
        ("max_seq_len", 0),
        ("max_seq_len", "long"),
        ("max_num_batched_tokens", -1),
        ("max_steps_per_launch", 0),
        ("max_queue_size", -1),
        ("kv_cache_memory_bytes", 0),
        ("kv_cache_memory_bytes", "much"),
        ("num_threads", 0),
        ("seed", -1),
        ("max_batchsize", 4),
    ],
)
def test_a_setting_that_makes_no_sense_or_does_not_exist_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig.model_validate({field: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EngineConfig().seed = 3  # type: ignore[misc]


def test_every_setting_has_a_help_text() -> None:
    assert [name for name, field in EngineConfig.model_fields.items() if not field.description] == []
