"""API workers: processes that share the server's address and do all text work, beside the engine's process.

The process that the user starts owns the engine and the address. It forwards signals, keeps the state that workers
share, and replaces workers that die or do not answer. Forking the engine's process would not be safe, so a nursery
forks the workers: a process that has imported what they need and runs no thread. They share its memory and start at
once.

    parent: engine, Crew --- nursery
      |  one socket each        | forks
      +------ worker, worker ---+
"""

from chairlift.api.workers.crew import Crew, choose_size
from chairlift.api.workers.nursery import Nursery, nurse

__all__ = ["Crew", "Nursery", "choose_size", "nurse"]
