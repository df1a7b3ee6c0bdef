"""Mixed load on a server for minutes on end: does it stay right, and does nothing stay behind?

    python -m tests.soak --minutes 2 --seed 1

Good requests of all kinds, bad ones, clients that leave, that read slowly, that break HTTP; in waves, between which
everything must come to rest. Every request must end exactly once, in a way that is right for it, and the server must
tell the same of it; in the end every slot is free and memory, threads, files and tasks are what they were after the
first wave. The server is one of its own in a child process, with limits so small that all of them are met. The last
line is JSON; the exit code is 1 if anything was wrong.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from random import Random, SystemRandom

from tests.soak.load import Load, Verdict, Wave, draw_waves, judge
from tests.soak.server import in_child_process

_WARM_UP_SHARE = 0.15


def main() -> int:
    """Soaks, prints what came of it, and returns the exit code."""
    arguments = _parse_arguments()
    seed = SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    verdict = asyncio.run(soak(arguments.minutes * 60, seed))
    for complaint in verdict.complaints:
        print(f"WRONG (seed {seed}): {complaint}")
    report = json.dumps({"seed": seed, "minutes": arguments.minutes, **verdict.record()})
    if arguments.json is not None:
        arguments.json.write_text(report + "\n", encoding="utf-8")
    print(report)
    return 1 if verdict.complaints else 0


async def soak(seconds: float, seed: int) -> Verdict:
    """Warms up until everything has been there once, then waves until the time is over."""
    rng, ends_at = Random(seed), time.monotonic() + seconds
    async with in_child_process() as target:
        load = Load(target, seed)
        for wave in [Wave(24, _WARM_UP_SHARE * seconds), Wave(8, 2.0, is_cut=True)]:
            await load.put(wave)
        before = await load.read_final_state()
        for wave in draw_waves(rng):
            await load.put(wave)
            print(f"{len(load.client_log.entries):6} requests so far", file=sys.stderr)
            if time.monotonic() > ends_at:
                break
        return judge(load, before, await load.read_final_state())


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, help="draws the requests; left out: a new one each time")
    parser.add_argument("--json", type=Path, help="file for the report")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
