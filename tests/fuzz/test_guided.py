"""The guided fuzzer's inputs stand for files, and each place where loading goes wrong is reported once."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.cases import CORPUS, list_files
from tests.fuzz.guided import main
from tests.fuzz.guided_input import crossed, join, mutated, seeds, split
from tests.fuzz.guided_target import Target

CONFIG = join("llama/config.json", (CORPUS / "llama/config.json").read_bytes())
MOST = 2**17


def test_every_file_of_the_corpus_is_an_input() -> None:
    given = list(seeds(""))
    assert [name for name, _ in given] == list_files()
    assert [split(join(name, content)) for name, content in given] == given
    assert [name for name, _ in seeds("lfm2/model")] == ["gguf-lfm2/model.gguf", "lfm2/model.safetensors"]


def test_what_names_no_file_is_no_input() -> None:
    assert split(b"llama/config.json") is None
    assert split(b"llama/../x\0{}") is None


def test_a_mutation_keeps_the_name_and_depends_on_its_seed_alone() -> None:
    made = [mutated(CONFIG, MOST, seed) for seed in range(40)]
    assert {(split(each) or ("none",))[0] for each in made} == {"llama/config.json"}
    assert len(set(made)) > 30
    assert made == [mutated(CONFIG, MOST, seed) for seed in range(40)]
    assert len(mutated(CONFIG, 100, 1)) <= 100
    assert split(mutated(b"nothing", MOST, 1)) is not None


def test_only_files_of_one_kind_are_crossed() -> None:
    other = join("lfm2/config.json", b"{" + b"x" * 500)
    assert any(b"xxxx" in crossed(CONFIG, other, MOST, seed) for seed in range(20))
    assert all(crossed(CONFIG, other, MOST, seed).startswith(b"llama/config.json\0") for seed in range(20))
    assert crossed(CONFIG, join("llama/model.safetensors", b"x" * 500), MOST, 1) == CONFIG


def test_each_place_of_a_defect_is_reported_once(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise (KeyError if len((path / "config.json").read_bytes()) < 10 else ValueError)("a defect")

    judge = Target(tmp_path, fail)
    assert [judge(each) for each in (CONFIG, CONFIG + b" ", join("llama/config.json", b"{}"), b"none")] == [0, 0, 0, -1]
    assert sorted(path.name.split("-")[1] for path in tmp_path.iterdir()) == ["KeyError", "ValueError"]
    assert CONFIG in [path.read_bytes() for path in tmp_path.iterdir()]


@pytest.mark.parametrize(("content", "said"), [(CONFIG, "loaded\n"), (CONFIG[:60], "refused")])
def test_one_input_is_loaded_again(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "input").write_bytes(content)
    assert main(["--input", str(tmp_path / "input")]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="the extra [fuzz] (atheris) is not installed")
def test_a_short_run_finds_inputs_that_reach_more_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.guided", "--minutes", "0.3", "--seed", "1", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, told["defects"]) == (0, [])
    assert told["inputs"] > len(list_files())
