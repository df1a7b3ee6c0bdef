"""OpenMP's threads spin for a short time, in programs that use the package as on the command line."""

import os
import subprocess
import sys

import pytest

import chairlift


def test_whoever_uses_a_public_name_has_threads_that_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that the variable is as before afterwards
    del os.environ["GOMP_SPINCOUNT"]
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert chairlift.SamplingParams().max_tokens
    assert os.environ["GOMP_SPINCOUNT"] == "20000"


def test_the_variable_is_set_before_torch_reads_it() -> None:
    program = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
import chairlift
chairlift.LLM
"""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "20000\n"


def test_a_policy_of_waiting_is_not_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    del os.environ["GOMP_SPINCOUNT"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert chairlift.SamplingParams().max_tokens
    assert "GOMP_SPINCOUNT" not in os.environ


def test_a_count_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert chairlift.SamplingParams().max_tokens
    assert os.environ["GOMP_SPINCOUNT"] == "5"
