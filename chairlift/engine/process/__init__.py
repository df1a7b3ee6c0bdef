"""The connections between the engine's process and its readers in other processes, the API workers.

    worker: AsyncLLM -> RemoteEngine == Unix socket == RemoteReader -> Subscription -> LocalEngine: the engine's process

To the worker, `RemoteEngine` is an `Engine`; to the engine, `RemoteReader` is a reader. A message is its length in four
bytes, then a pickle; each end offers the other services, by name. Tokens are sent in columns: a step of a thousand
takes 18 kB. Only one update at a time is in flight to a worker; until the worker has taken it, news are merged in the
subscription. An update with many scores is sent in parts, which a thread pickles.

Grammars stay with the engine, which compiles them: a worker has a number instead, and the engine keeps the grammar as
long as the worker has the number. When a worker dies, its socket closes, and all its requests end. Both ends ping each
other, because the socket of a process that is stopped stays open.
"""

from chairlift.engine.process.connection import read_message
from chairlift.engine.process.messages import PackedUpdate
from chairlift.engine.process.remote_engine import RemoteEngine
from chairlift.engine.process.remote_reader import RemoteReader

__all__ = ["PackedUpdate", "RemoteEngine", "RemoteReader", "read_message"]
