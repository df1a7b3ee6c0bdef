"""Files of requests and their replies, in the format of OpenAI's batches: made by `chairlift run-batch`, or by a server
at idle priority for clients of `/v1/files` and `/v1/batches`.
"""

from chairlift.api.batches.directory import BatchDirectory, claim_directory
from chairlift.api.batches.executor import executing_batches

__all__ = ["BatchDirectory", "claim_directory", "executing_batches"]
