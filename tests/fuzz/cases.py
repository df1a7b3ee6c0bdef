"""The files that are mutated, and the cases made of them: each depends on nothing but its file and its number."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.fuzz.mutations import mutate

CORPUS = Path(__file__).with_name("corpus")
SHARED = "llama"  # has the tokenizer that others borrow
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Case:
    """A mutation of one file of a checkpoint. Written as `llama/config.json:17`; number 0 is the file unchanged."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        file, _, number = text.rpartition(":")
        return cls(file, int(number))

    def content(self) -> bytes:
        """The file's bytes after the mutation."""
        whole = (CORPUS / self.file).read_bytes()
        return mutate(self.file, whole, Random(str(self))) if self.number else whole


def list_files() -> list[str]:
    """The corpus, as paths within it."""
    return sorted(str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*") if path.is_file())


@contextmanager
def laid_out(file: str, content: bytes) -> Iterator[Path]:
    """The checkpoint with that content in place of one file. Yields the path that serves it."""
    checkpoint = CORPUS / Path(file).parts[0]
    with TemporaryDirectory(prefix="fuzz-") as directory:
        copy = Path(directory)
        for path in checkpoint.iterdir():
            (copy / path.name).symlink_to(path)
        if not (checkpoint / "model.gguf").exists() and checkpoint.name != SHARED:
            for name in TOKENIZER_FILES:
                (copy / name).symlink_to(CORPUS / SHARED / name)
        changed = copy / Path(file).name
        changed.unlink()
        changed.write_bytes(content)
        yield changed if changed.suffix == ".gguf" else copy


def write_out(case: Case, directory: Path) -> Path:
    """Writes a case's checkpoint into a directory that stays, to look at it. Returns the path that serves it."""
    with laid_out(case.file, case.content()) as path:
        source = path if path.is_dir() else path.parent
        shutil.copytree(source, directory)
    return directory / path.name if path.suffix == ".gguf" else directory
