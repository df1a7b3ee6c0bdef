"""Says who takes part: what `--peer` names, and how its worker is started."""

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from peers.workers.protocol import Settings

OURS = "chairlift"
RIVALS = ("vllm", "llama.cpp", "openvino")  # of these the fastest is the "best peer"
_WORKERS = {
    "chairlift": "chairlift_worker",
    "transformers": "transformers_worker",
    "transformers-batch": "transformers_worker",
    "vllm": "vllm_worker",
    "openvino": "openvino_worker",
    "llama.cpp": "llama_cpp_worker",
    "rates": "rates_worker",
}
_NEEDED_PATHS = {"vllm": "its Python", "openvino": "its Python", "llama.cpp": "its llama-server"}
_NEEDED_OPTIONS = {"llama.cpp": "gguf", "openvino": "model"}
_FILE_OPTIONS = ("gguf", "model", "preload")  # options that name files or folders, with ":" between them

PEERS = tuple(name for name in _WORKERS if name != "rates")


class UsageError(Exception):
    """The command line names what is not there. One line."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One that takes part. `options` reach its worker as they are; `preload` names libraries for LD_PRELOAD."""

    name: str  # unique in a run
    kind: str  # which worker
    python: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """`KIND[=PATH][,key=value...]`; the option `as` gives a name of one's own. Raises `UsageError`."""
        head, *rest = text.split(",")
        kind, _, path = head.partition("=")
        if kind not in PEERS:
            raise UsageError(f"--peer {kind}: no such peer; there are {', '.join(PEERS)}")
        options = dict(_parse_option(kind, each) for each in rest)
        if kind in _NEEDED_PATHS and not path:
            raise UsageError(f"--peer {kind}: name {_NEEDED_PATHS[kind]}, as {kind}=/path/to/it")
        found = _executable(kind, path) if path else sys.executable
        name, needed = options.pop("as", kind), _NEEDED_OPTIONS.get(kind)
        if name == "chairlift":
            raise UsageError(
                "--peer chairlift: give it a name, as chairlift,as=NAME,SETTING=VALUE: one takes part anyway"
            )
        if needed and needed not in options:
            raise UsageError(f"--peer {kind}: name its {needed}, as {kind}={path},{needed}=PATH")
        if kind == "transformers-batch":
            options["batch"] = "1"
        if kind == "llama.cpp":
            return cls(name, kind, sys.executable, {**options, "binary": found})
        return cls(name, kind, found, options)

    def command(self) -> list[str]:
        return [self.python, "-m", f"peers.workers.{_WORKERS[self.kind]}"]

    def environment(self, settings: Settings, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Ours of the worker: threads on `num_threads` cores, our scripts on its path, no look at the network."""
        cores = settings.num_threads
        environment = {
            **inherited,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": str(cores),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.kind == "vllm":
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": str(settings.cache_gigabytes),
                "VLLM_CPU_OMP_THREADS_BIND": _cores_text(cores),
                "VLLM_NO_USAGE_STATS": "1",
            }
            del environment["OMP_NUM_THREADS"]  # the binding decides
        if "level" in self.options:
            environment["CHAIRLIFT_CPU_LEVEL"] = self.options["level"]
        if "preload" in self.options:
            environment["LD_PRELOAD"] = self.options["preload"]
        return environment


def take_part(peers: Sequence[str], *ours: Engine) -> list[Engine]:
    """Chairlift, others of ours, and the peers. Raises `UsageError` for a peer that is not there or named twice."""
    engines = [Engine(OURS, "chairlift", sys.executable), *ours, *map(Engine.parse, peers)]
    names = [engine.name for engine in engines]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--peer {name}: named twice; tell them apart with as=NAME")
    return engines


def exit_on_signals() -> None:
    """A signal that ends the driver ends it in good order, so that its workers are ended, stopped ones as well."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))


def _parse_option(kind: str, text: str) -> tuple[str, str]:
    key, is_pair, value = text.partition("=")
    if not is_pair:
        raise UsageError(f"--peer {kind}: {text!r} is no option: write key=value")
    if key not in _FILE_OPTIONS:
        return key, value
    for path in map(Path, value.split(":")):
        if not path.exists():
            raise UsageError(f"--peer {kind}: nothing at {path}")
    return key, ":".join(os.path.abspath(path) for path in value.split(":"))


def _executable(kind: str, path: str) -> str:
    """Absolute, but not resolved: a virtual environment's Python is a link that must stay one."""
    if (found := shutil.which(path)) is None:
        raise UsageError(f"--peer {kind}: no executable file at {path}")
    return os.path.abspath(found)


def _cores_text(count: int) -> str:
    """The first so many that this process may use, as vLLM wants them written."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:count]))
