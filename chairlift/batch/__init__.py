"""Files of requests: `chairlift run-batch` answers each line of a file, in the format of OpenAI's batches."""

from chairlift.batch.config import BatchConfig

__all__ = ["BatchConfig"]
