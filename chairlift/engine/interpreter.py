"""Starts fresh interpreters: ranks, and the process that API workers are forked from."""

import os
import subprocess
import sys


def start_interpreter(program: str, fd: int) -> "subprocess.Popen[bytes]":
    """Starts a process that runs a Python program and inherits a file descriptor. It finds modules where this process
    does, and runs nothing of the user's main program.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL, pass_fds=[fd])
