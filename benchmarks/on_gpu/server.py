"""`chairlift serve` on random weights, with the graphs that are asked for. A process of its own, see `serving`."""

import argparse
import sys
from pathlib import Path

import torch

from chairlift import EngineConfig
from chairlift.__main__ import serve
from chairlift.api import ServerConfig
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.core import EngineCore
from chairlift.engine.thread import LocalEngine
from on_gpu.engine import Graphs, parts_of


def main() -> int:
    """Serves until a signal comes; returns the exit code."""
    arguments = _parse_arguments()
    config = EngineConfig(
        model=str(arguments.model),
        device=arguments.device,
        dtype=arguments.dtype,
        load_format="dummy",
        attention_backend=arguments.attention,
        max_batch_size=arguments.max_batch_size,
        max_seq_len=arguments.max_seq_len,
    )
    parts = parts_of(torch.device(arguments.device), arguments.graphs)

    def make_llm(config: EngineConfig) -> AsyncLLM:
        return AsyncLLM.of(LocalEngine(EngineCore(config, parts)))

    return serve(config, ServerConfig(port=arguments.port, api_workers=1), make_llm)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    for name in ("port", "max-batch-size", "max-seq-len"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("device", "dtype", "attention"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--graphs", type=Graphs, default=Graphs.ALL)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
