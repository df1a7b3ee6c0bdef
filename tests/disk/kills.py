"""Kills engines that save prompts, at random moments, and looks whether their successors say anything wrong.

python -m tests.disk.kills --kills 200
python -m tests.disk.kills --kills 50 --ranks 2
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.core import EngineCore
from tests.engine.support import make_tiny_checkpoint
from tests.support.checkpoints import random_prompts
from tests.support.engines import core_of
from tests.support.fork_server import ForkedProcess
from tests.support.server_process import start_python

PROMPTS = random_prompts(7, [200, 130, 230, 70, 190], 250)
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
MOST_S = 0.6  # after which a process is killed that has begun
WORK = "import sys; from tests.disk.kills import work; work(*sys.argv[1:])"
BUDGET = 500_000  # bytes: less than all prompts take, so that some are evicted


def answer(llm: LLM, prompt: list[int]) -> str:
    """The answer, with all bits of its log-probabilities."""
    choice = llm.generate([prompt], PARAMS)[0].outputs[0]
    assert choice.logprobs is not None
    scores = [sorted((token, each.logprob) for token, each in place.items()) for place in choice.logprobs]
    return json.dumps([list(choice.token_ids), scores])


def make_engine(model: str, directory: str | None, num_ranks: int) -> LLM:
    config = EngineConfig(
        model=model,
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_batch_size=2,
        max_seq_len=256,
        prefix_cache_dir=directory,
        prefix_cache_bytes=BUDGET,
        tensor_parallel_size=num_ranks,
        batch_invariant=num_ranks > 1,  # what native code is in any case
    )
    return LLM.of(EngineCore(config))


def work(model: str, directory: str, expected: str, seed: str, num_ranks: str) -> None:
    """Answers prompts and saves them until it is killed. Says so when it has begun, and when an answer is wrong."""
    answers, chance = json.loads(Path(expected).read_text()), random.Random(seed)
    llm = make_engine(model, directory, int(num_ranks))
    core = core_of(llm)
    num_cached = 0
    while True:
        index = chance.randrange(len(PROMPTS))
        is_right = answer(llm, PROMPTS[index]) == answers[index]
        num_cached = max(num_cached, core.read_stats().saved.num_tokens_read)
        os.write(2, f"{'right' if is_right else 'WRONG'} {num_cached}\n".encode())
        while core.save_next(0.01):
            pass
        if chance.random() < 0.2:
            core.scheduler.reset_prefix_cache()  # so that it is read again


def kill_again_and_again(folder: Path, num_kills: int, num_ranks: int = 1) -> tuple[int, int]:
    """Returns how many answers were right, and how many processes had read something. Raises if one is wrong."""
    heads = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2} if num_ranks > 1 else {"head_dim": 32}
    model = make_tiny_checkpoint(folder / "model", **heads)
    expected, chance = folder / "expected.json", random.Random(0)
    with make_engine(model, None, num_ranks) as llm:
        expected.write_text(json.dumps([answer(llm, prompt) for prompt in PROMPTS]))
    num_right = num_reading = 0
    for number in range(num_kills):
        end, other = os.pipe()
        arguments = [model, str(folder / "saved"), str(expected), str(number), str(num_ranks)]
        process = start_python(WORK, arguments, os.environ, other)
        os.close(other)
        with os.fdopen(end) as told:
            said = [_first_word(told, number)]
            wait_s = chance.random() * MOST_S
            _wait(process, wait_s)
            process.kill()
            process.wait()
            said += [line for line in told if line.startswith(("right", "WRONG"))]
        assert not any(line.startswith("WRONG") for line in said), f"a wrong answer after {number} kills"
        num_right += len(said)
        num_reading += not said[-1].endswith(" 0\n")
    return num_right, num_reading


def _first_word(told: IO[str], number: int) -> str:
    """Waits until a process has answered once."""
    log = []
    for line in told:
        if line.startswith(("right", "WRONG")):
            return line
        log.append(line)
    raise AssertionError(f"it did not start after {number} kills: {''.join(log)}")


def _wait(process: "subprocess.Popen[bytes] | ForkedProcess", seconds: float) -> None:
    try:
        process.wait(seconds)
    except (subprocess.TimeoutExpired, TimeoutError):
        return
    raise AssertionError("it ended by itself")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    chosen = parser.parse_args()
    num_kills = chosen.kills
    (folder / "model").mkdir()
    num_right, num_reading = kill_again_and_again(folder, num_kills, chosen.ranks)
    shutil.rmtree(folder)
    sys.stdout.write(
        f"{num_kills} kills: {num_right} answers, none wrong; {num_reading} processes read what was saved\n"
    )


if __name__ == "__main__":
    main()
