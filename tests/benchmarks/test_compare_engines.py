"""What `--peer` may name."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from peers.engines import Engine, UsageError

from .fakes import SETTINGS


def test_a_peer_runs_in_its_own_python() -> None:
    engine = Engine.parse(f"vllm={sys.executable},max_num_batched_tokens=2048,as=vllm-2k")
    assert engine == Engine("vllm-2k", "vllm", sys.executable, {"max_num_batched_tokens": "2048"})
    assert engine.command() == [sys.executable, "-m", "peers.workers.vllm_worker"]


def test_transformers_may_run_in_ours() -> None:
    assert Engine.parse("transformers") == Engine("transformers", "transformers", sys.executable)
    assert Engine.parse("transformers-batch").options == {"batch": "1"}


def test_llama_cpp_s_server_is_driven_by_our_python(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    engine = Engine.parse(f"llama.cpp={sys.executable},gguf={model}")
    assert engine.python == sys.executable
    assert engine.options == {"gguf": str(model), "binary": sys.executable}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vlm=/bin/sh", "--peer vlm: no such peer; there are chairlift, transformers, transformers-batch, vllm"),
        ("chairlift", "--peer chairlift: give it a name, as chairlift,as=NAME,SETTING=VALUE"),
        ("vllm", "--peer vllm: name its Python, as vllm=/path/to/it"),
        ("vllm=/no/python", "--peer vllm: no executable file at /no/python"),
        ("llama.cpp=/bin/sh", "--peer llama.cpp: name its gguf, as llama.cpp=/bin/sh,gguf=PATH"),
        ("llama.cpp=/bin/sh,gguf=/no/file", "--peer llama.cpp: nothing at /no/file"),
        ("openvino=/bin/sh,hint=LATENCY", "--peer openvino: name its model"),
        ("vllm=/bin/sh,fast", "--peer vllm: 'fast' is no option: write key=value"),
        ("vllm=/bin/sh,preload=/bin/sh:/no/library", "--peer vllm: nothing at /no/library"),
    ],
)
def test_what_is_not_there_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Engine.parse(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_workers_see_our_scripts_and_no_network() -> None:
    environment = Engine.parse("transformers").environment(replace(SETTINGS, num_threads=2), {"PATH": "/bin"})
    assert Path(environment["PYTHONPATH"]).name == "benchmarks"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["PATH"] == "/bin"


def test_vllm_is_told_its_cores_and_cache_in_the_environment() -> None:
    settings = replace(SETTINGS, num_threads=1, cache_gigabytes=3)
    environment = Engine.parse("vllm=/bin/sh,preload=/bin/sh:/bin/ls").environment(settings, {})
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"].isdigit()
    assert "OMP_NUM_THREADS" not in environment
    assert environment["LD_PRELOAD"] == "/bin/sh:/bin/ls"
