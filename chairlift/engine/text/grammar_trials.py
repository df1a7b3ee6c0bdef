"""Tries grammars out in a helper process, so that no grammar of a client can end the server.

llguidance compiles clients' grammars in native code. Deep nesting overflows its stack, and small texts can take
minutes or gigabytes; its own limits do not prevent all of that, and in the server's process each case would end the
server. So the program `trial_process` compiles each first, and the server compiles only grammars that survived there.

Without fork (on Windows), `IS_POSSIBLE` is false, and only llguidance's own limits apply.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from chairlift.engine.text import trial_process
from chairlift.engine.text.trial_process import BEGUN, OVERFLOW, Verdict, read_all

logger = logging.getLogger(__name__)

IS_POSSIBLE = hasattr(os, "fork") and find_spec("resource") is not None

_ANSWER_S = 60.0


class GrammarTrials:
    """Tries grammars out in a helper process, which starts when first needed and again if it dies. Thread-safe."""

    def __init__(self, read_settings: Callable[[], bytes]) -> None:
        """`read_settings`: JSON with `tokenizer` and `limits`; called when the process starts."""
        self._read_settings = read_settings
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._is_closed = False

    def perform(self, outputs: str) -> Verdict:
        """Waits for the verdict on the fields of a `StructuredOutputs`, in JSON. OSError if there is no process."""
        answer = self._usable_helper().ask(outputs.encode())
        if not answer and not self._is_closed:  # it died, for instance because an operator killed it
            answer = self._usable_helper().ask(outputs.encode())
        if self._is_closed:
            raise ChildProcessError("the grammar compiler was closed")
        if not answer:
            raise ChildProcessError("the process that compiles grammars died")
        if answer == BEGUN:  # the child overflowed its stack, found no memory, or its time was up
            return Verdict(error=OVERFLOW)
        reply = json.loads(answer)
        if "failure" in reply:
            raise ChildProcessError(reply["failure"])
        return Verdict(**reply)

    def close(self) -> None:
        """Ends the process and its children; pending calls of `perform` fail."""
        with self._lock:
            self._is_closed = True
            if self._helper is not None:
                self._helper.kill()

    def _usable_helper(self) -> "_Helper":
        with self._lock:
            if self._is_closed:
                raise ChildProcessError("the grammar compiler was closed")
            if self._helper is not None and self._helper.process.poll() is not None:
                logger.warning("the process that compiles grammars died; it is started again")
                self._helper.kill()
                self._helper = None
            if self._helper is None:
                self._helper = _Helper(self._read_settings())
            return self._helper


class _Helper:
    """Runs the program `trial_process`."""

    def __init__(self, settings: bytes) -> None:
        import llguidance

        package = Path(llguidance.__file__).parent.parent
        self._lock = threading.Lock()  # for the socket, which must not be closed while in use
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", trial_process.__file__, str(package)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # else threads reserve memory that counts as used
                    start_new_session=True,  # Ctrl-C must reach only the server
                )
        except OSError:
            self._control.close()
            raise
        with suppress(OSError):  # it died; `ask` will find out
            self._send(settings).close()

    def ask(self, message: bytes) -> bytes:
        """Waits for the whole answer, which is empty if the process died before it forked a child for this message."""
        try:
            with self._send(message) as connection:
                return read_all(connection)
        except TimeoutError as error:
            self.kill()
            raise ChildProcessError("the process that compiles grammars does not answer") from error
        except OSError:  # it died, or was closed
            self.kill()
            return b""

    def kill(self) -> None:
        """Ends the process and its children. May be called from any thread, and more than once."""
        with self._lock:
            self._control.close()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _send(self, message: bytes) -> socket.socket:
        """Sends a message; returns the connection for its answer."""
        connection, theirs = socket.socketpair()
        try:
            connection.settimeout(_ANSWER_S)
            with theirs, self._lock:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            connection.close()
            raise
        return connection
