"""The process that libFuzzer drives: it loads one input after the other, and writes down those that show a defect."""

import hashlib
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.cases import laid_out
from tests.fuzz.guided_input import crossed, mutated, split

_ADDRESS_SPACE = 2 * 2**30  # bytes beyond what is mapped at the beginning
_REJECTED = -1  # to libFuzzer: the input is not worth keeping
_INSTRUMENTED = ["chairlift.models", "chairlift.engine.text"]
_FORMAT_SHARE = 4  # one mutation in so many is libFuzzer's own

Report = Callable[[bytes, Exception], None]
"""Takes an input that shows a defect, and the exception."""


class Target:
    """Loads inputs. Each place in the code where something goes wrong is reported once."""

    def __init__(self, findings: Path, load: Callable[[Path], str | None] | None = None) -> None:
        """`load`: as `target.load` does, which is the default."""
        self._findings, self._load = findings, load

    def __call__(self, data: bytes) -> int:
        """Loads one input, as libFuzzer calls it."""
        if split(data) is None:
            return _REJECTED
        self.judge(data, self._report)
        return 0

    def judge(self, data: bytes, report: Report | None = None) -> str | None:
        """Loads one input. Returns None, or why it is refused. A defect goes to `report`, or is raised without one."""
        from tests.fuzz.target import load

        named = split(data)
        assert named is not None, "the input names no file of the corpus"
        with laid_out(*named) as path:
            try:
                return (self._load or load)(path)
            except Exception as error:
                if report is None:
                    raise
                report(data, error)
        return None

    def _report(self, data: bytes, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((each for each in reversed(frames) if "/chairlift/" in each.filename), frames[-1])
        where = f"{type(error).__name__}-{Path(place.filename).stem}-{place.lineno}"
        if any(each.name.startswith(f"defect-{where}-") for each in self._findings.iterdir()):
            return
        path = self._findings / f"defect-{where}-{hashlib.sha256(data).hexdigest()[:8]}"
        path.write_bytes(data)
        sys.stdout.write(f"{path}\n{''.join(traceback.format_exception(error))}\n")
        sys.stdout.flush()


def main() -> None:
    """`guided_target FINDINGS CORPUS FLAGS...`: libFuzzer's own flags."""
    import atheris

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=_INSTRUMENTED):
        from tests.fuzz.target import load

    from tests.fuzz.limits import limit_address_space

    assert load is not None, "imported here, so that its code is instrumented"

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        named = split(data)
        if seed % _FORMAT_SHARE or named is None:
            return mutated(data, most, seed)
        head = data[: len(data) - len(named[1])]
        return bytes(head + atheris.Mutate(named[1], most - len(head)))

    target = Target(Path(sys.argv[1]))
    limit_address_space(_ADDRESS_SPACE)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target, custom_mutator=mutate, custom_crossover=crossed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
