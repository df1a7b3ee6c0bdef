"""Has the threads of OpenMP sleep soon while they have nothing to do."""

import os

_VARIABLE = "GOMP_SPINCOUNT"
_SPIN_COUNT = "20000"  # a millisecond


def limit_spinning() -> None:
    """Sets the variable that says how long they spin, unless the environment says how they wait.

    By default it is many milliseconds, on cores that other programs need, or the very thread that they wait for: beside
    a busy program a decode step takes twice as long. Torch loads OpenMP, which reads the variable then and never again.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # which the count would overrule
        os.environ.setdefault(_VARIABLE, _SPIN_COUNT)
