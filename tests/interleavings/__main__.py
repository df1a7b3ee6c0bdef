"""Visits every state of some scopes, and prints what was seen or the shortest way to what must never be.

python -m tests.interleavings                  the large scopes, to their ends: hours
python -m tests.interleavings order leaders    these alone
"""

import argparse
import sys
import time

from tests.interleavings.scopes import EVERYDAY, FULL, LARGE
from tests.interleavings.scopes_of_disks import DISKS, LARGE_DISKS
from tests.interleavings.scopes_of_states import LARGE_STATES, STATES
from tests.interleavings.search import Counterexample, search


def main() -> int:
    scopes = {scope.name: scope for scope in (*EVERYDAY, *FULL, *STATES, *DISKS, *LARGE, *LARGE_STATES, *LARGE_DISKS)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scopes", nargs="*", metavar="SCOPE", help=f"one of {', '.join(scopes)}")
    parser.add_argument("--max-states", type=int, help="visit only the nearest states, so many of each scope")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.scopes if name not in scopes]:
        parser.error(f"there is no scope {unknown[0]!r}")
    for name in arguments.scopes or [scope.name for scope in (*LARGE, *LARGE_STATES, *LARGE_DISKS)]:
        begin = time.process_time()
        try:
            found = search(scopes[name], arguments.max_states)
        except Counterexample as error:
            print(error)
            return 1
        seconds = time.process_time() - begin
        told = f"all {found.num_states}" if found.is_complete else f"{arguments.max_states} of {found.num_states} known"
        print(
            f"{name}: {told} states, {found.num_actions} actions, {found.depth} deep,"
            f" the end at most {found.longest_way} actions away, {seconds:.0f} s of a core",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
