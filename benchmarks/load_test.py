"""The load test as a script: `python benchmarks/load_test.py --url U --request-rate 4` is `chairlift bench ...`.

docs/load-test.md has the flags, the definitions and the file formats.
"""

import sys

from chairlift.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
