"""The benchmark of products, in the small."""

import products

from tests.support.kernels import needs_kernels

from .conftest import RunScript


@needs_kernels
def test_every_way_to_multiply_has_a_rate(run_script: RunScript) -> None:
    ran = run_script(products, "--rows", "1", "3", "--shapes", "64x48", "--calls", "1")
    assert ran.code == 0
    sizes = [(each["rows"], each["inputs"], each["outputs"]) for each in ran.report["results"]]
    assert sizes == [(1, 64, 48), (3, 64, 48)]
    assert all(list(each["gflops"]) == ["chairlift", "linear", "packed"] for each in ran.report["results"])


def test_a_shape_that_is_none_is_named(run_script: RunScript) -> None:
    ran = run_script(products, "--shapes", "64")
    assert (ran.code, ran.err) == (2, "products.py: '64' is no shape: write INPUTSxOUTPUTS\n")
