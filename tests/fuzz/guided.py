"""Loads mutated checkpoints, guided by coverage: what reaches code that nothing reached before is mutated further.

    python -m tests.fuzz.guided --minutes 60 --seed 1 --keep DIR
    python -m tests.fuzz.guided --input DIR/defect-...

Needs the extra [fuzz] (atheris), except for `--input`, which loads one input and says what comes of it. Loading is all
that is done, since its code in Python is where files are judged; `python -m tests.fuzz` serves them. The last line is
JSON; the exit code is 1 if there was a defect.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom

from tests.fuzz.guided_input import join, seeds

_RSS_LIMIT_MB = 4096
_TIMEOUT_S = 60  # of one input
_MOST_MUTATIONS = 2  # of an input in a row: after more, nothing but the first mistake counts
_MOST_BYTES = 2**17  # of one input


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    if given.input is not None:
        from tests.fuzz.guided_target import Target

        refusal = Target(given.input.parent).judge(given.input.read_bytes())
        sys.stdout.write("loaded\n" if refusal is None else f"refused: {refusal}\n")
        return 0
    if given.keep is not None:
        return _fuzz(given, given.keep)
    with tempfile.TemporaryDirectory(prefix="guided-") as directory:
        return _fuzz(given, Path(directory))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1, 2**20))
    parser.add_argument("--only", default="", help="files of the corpus whose name has this in it")
    parser.add_argument("--keep", type=Path, help="directory for inputs and defects, to go on from")
    parser.add_argument("--input", type=Path, help="loads this input alone")
    return parser.parse_args(arguments)


def _fuzz(given: argparse.Namespace, directory: Path) -> int:
    """Runs the fuzzer until the time is up. It begins again where an input ends its process."""
    corpus, findings = directory / "corpus", directory / "findings"
    for each in (corpus, findings):
        each.mkdir(parents=True, exist_ok=True)
    for number, (name, content) in enumerate(seeds(given.only)):
        (corpus / f"seed-{number}").write_bytes(join(name, content))
    until, starts = time.monotonic() + 60 * given.minutes, 0
    while (seconds := int(until - time.monotonic())) > 0:
        command = [sys.executable, "-m", "tests.fuzz.guided_target", str(findings), str(corpus)]
        command += [f"-max_total_time={seconds}", f"-seed={given.seed + starts}", f"-artifact_prefix={findings}/"]
        command += [f"-rss_limit_mb={_RSS_LIMIT_MB}", f"-timeout={_TIMEOUT_S}", f"-max_len={_MOST_BYTES}"]
        command += [f"-mutate_depth={_MOST_MUTATIONS}", f"-report_slow_units={_TIMEOUT_S}"]
        one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        num_before = len(list(findings.iterdir()))
        done = subprocess.run(command, check=False, env={**os.environ, **one_thread})
        starts += 1
        if done.returncode == 0:
            break
        if len(list(findings.iterdir())) == num_before:
            raise SystemExit(f"the fuzzer ended with {done.returncode} without an input that is to blame")
    defects = sorted(path.name for path in findings.iterdir())
    told = {"seed": given.seed, "inputs": len(list(corpus.iterdir())), "starts": starts, "defects": defects}
    sys.stdout.write(json.dumps(told) + "\n")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
