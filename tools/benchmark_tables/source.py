"""Says where a table's figures come from: a JSON file, and the line below the table that says what was measured
where.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")
_LEVELS = {
    "amx": "AMX",
    "avx512_bf16": "AVX-512, VNNI and bf16",
    "avx512_vnni": "AVX-512 and VNNI",
    "avx512": "AVX-512",
    "avx2_vnni": "AVX2 and VNNI",
    "avx2": "AVX2 alone",
}


def level_name(level: str) -> str:
    """The name of an instruction set as the documents write it."""
    return _LEVELS[level]


@dataclass(frozen=True, slots=True)
class Source:
    """One file of `benchmarks/results`; the other fields say by hand what a file does not hold."""

    name: str
    where: str = ""  # processor, instruction set and threads
    commit: str = ""  # what was measured, where the file tells it in words
    recorded: str = ""  # the commit that added the file, where nothing tells what was measured
    labels: str = ""  # of a file with several runs: those whose name contains this

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def read(self, root: Path) -> Any:
        """The file's JSON, of a file with several runs those that `labels` names."""
        data = json.loads((root / self.path).read_text(encoding="utf-8"))
        return {label: run for label, run in data.items() if self.labels in label} if self.labels else data

    def caption(self, data: Any, link: str) -> str:
        """The line below a table, which names processor, threads and commit."""
        return f"{self.where or self._where(data)}, {self._when(data)} ([all figures]({link}))."

    def _where(self, data: Any) -> str:
        if "device" in data:
            return f"{data['device']}, torch {data['versions']['torch']}"
        run = next(_runs(data))
        processor = run["machine"]["cpu"].replace("(R)", "").removesuffix(" Processor")
        threads = run["settings"].get("num_threads") or run["settings"].get("threads")
        count = f"{threads} threads" if threads else f"{run['machine']['cores']} cores"
        return f"{processor} with {level_name(self._level(run))}, {count}"

    def _level(self, run: Any) -> str:
        """The one that was used: of a run that forced several, or that does not tell, the one in the file's name."""
        forced = {engine["options"].get("level") for engine in run.get("engines", {}).values() if "options" in engine}
        if len(forced) == 1 and None not in forced:
            return str(forced.pop())
        return run["machine"].get("cpu_level") or next(level for level in _LEVELS if level in self.name.split("-"))

    def _when(self, data: Any) -> str:
        if self.recorded:
            return f"recorded in commit {self.recorded}"
        commits = [self.commit] if self.commit else list(dict.fromkeys(run["commit"] for run in _runs(data)))
        return ("commit " if len(commits) == 1 else "commits ") + " and ".join(map(short, commits))


def short(commit: str) -> str:
    """Seven digits, and whether there were changes that are in no commit."""
    return commit[:7] + (" with changes" if commit.endswith("+") else "")


def _runs(data: Any) -> Iterator[Any]:
    """A file's runs; most files have one."""
    yield from [data] if "commit" in data or "machine" in data else data.values()
