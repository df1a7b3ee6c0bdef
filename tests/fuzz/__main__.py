"""Serves mutated checkpoints until a time or a number of cases is up, and prints every defect with its case.

    python -m tests.fuzz --minutes 60 --seed 1
    python -m tests.fuzz --case llama/config.json:17

A case's name makes it again. The last line is JSON; the exit code is 1 if there was a defect.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

from tests.fuzz.cases import Case, laid_out, list_files, write_out
from tests.fuzz.runner import Outcome, run
from tests.fuzz.target import attempt, serve

_ROUND = 20  # cases of each file before the next one's turn


def main() -> int:
    given = _arguments()
    if given.write is not None:
        sys.stdout.write(f"{write_out(Case.parse(given.case), given.write)}\n")
        return 0
    _warm_up()
    until = time.monotonic() + 60 * given.minutes
    counts: Counter[str] = Counter()
    for cases in [[Case.parse(given.case)]] if given.case else _rounds(given):
        for outcome in run(cases, attempt):
            counts[_kind(outcome)] += 1
            if outcome.defect is not None:
                sys.stdout.write(f"{outcome.case}: {outcome.defect}\n\n")
            elif given.verbose:
                sys.stdout.write(f"{outcome.case}: {outcome.refusal or 'served'}\n")
        sys.stdout.flush()
        if time.monotonic() > until:
            break
    sys.stdout.write(json.dumps({"seed": given.seed, **counts}) + "\n")
    return 1 if counts["defects"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(2**20), help="0: as in CI")
    parser.add_argument("--rounds", type=int, help=f"of {_ROUND} cases of each file; none: until the time is up")
    parser.add_argument("--only", default="", help="files of the corpus whose name has this in it")
    parser.add_argument("--case", help="runs this case alone")
    parser.add_argument("--write", type=Path, help="writes the case's checkpoint into this directory instead")
    parser.add_argument("--verbose", action="store_true", help="prints what became of every case")
    return parser.parse_args()


def _rounds(given: argparse.Namespace) -> Iterator[list[Case]]:
    """Some cases of each file in turn, so that all get the same share of the time."""
    files = [file for file in list_files() if given.only in file]
    number = given.seed * 10**9
    while given.rounds is None or number < given.seed * 10**9 + given.rounds * _ROUND:
        for file in files:
            yield [Case(file, number + index) for index in range(1, _ROUND + 1)]
        number += _ROUND


def _kind(outcome: Outcome) -> str:
    return "defects" if outcome.defect else "refused" if outcome.refusal else "served"


def _warm_up() -> None:
    """Imports what serving needs, so that forks have it; the whole corpus is served once, by this process."""
    for checkpoint in sorted({file.partition("/")[0] for file in list_files()}):
        whole = Case(next(file for file in list_files() if file.startswith(f"{checkpoint}/")), 0)
        with laid_out(whole.file, whole.content()) as path:
            refusal = serve(path)
        if refusal is not None:
            raise SystemExit(f"{checkpoint} is refused as it is: {refusal}")
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    sys.exit(main())
