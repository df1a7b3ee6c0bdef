"""What the log tells of requests: a line for each when it is over, and now and then one for all that run.

No text of a prompt or an answer is ever in it.
"""

import asyncio
import logging
from collections.abc import Callable

from chairlift.api.log_format import Field, with_fields
from chairlift.api.observation import Observation
from chairlift.engine.stats import EngineStats

logger = logging.getLogger(__name__)


def log_request(observation: Observation) -> None:
    """The line of a request that is over."""
    logger.info("request", extra=with_fields(request_fields(observation)))


def request_fields(observation: Observation) -> dict[str, Field]:
    """What the line says. Of a request that was refused before it came to prompts there is no more than its status."""
    fields: dict[str, Field] = {
        "request_id": observation.request_id,
        "path": observation.path,
        "status": observation.status,
        "total_seconds": _rounded(observation.total_seconds),
    }
    if not observation.generations:
        return fields
    return fields | {
        "id": observation.reply_id,
        "finish": ",".join(dict.fromkeys(observation.outcomes)),
        "stream": "yes" if observation.is_streamed else "no",
        "prompt_tokens": observation.num_prompt_tokens,
        "cached_tokens": observation.num_cached_tokens,
        "output_tokens": sum(observation.output_lengths),
        "queue_seconds": _rounded(observation.queue_seconds),
        "first_token_seconds": _rounded(observation.first_token_seconds),
        "error": None if observation.error is None else type(observation.error).__name__,
    }


async def log_activity(read_stats: Callable[[], EngineStats], num_slots: int, interval_s: float) -> None:
    """Writes a line every so many seconds, for ever, but for times in which nothing ran."""
    before = read_stats()
    while True:
        await asyncio.sleep(interval_s)
        now = read_stats()
        if now.num_running or now.num_waiting or now.step_rows != before.step_rows:
            logger.info("batch", extra=with_fields(activity_fields(before, now, num_slots)))
        before = now


def activity_fields(before: EngineStats, now: EngineStats, num_slots: int) -> dict[str, Field]:
    """What was done between two looks: rates per second, the mean of rows in a step, and who runs and waits."""
    seconds = now.time - before.time
    num_prompt = now.totals.num_prompt_tokens - before.totals.num_prompt_tokens
    num_cached = now.totals.num_cached_tokens - before.totals.num_cached_tokens
    num_generated = now.totals.num_generated_tokens - before.totals.num_generated_tokens
    num_steps = now.step_rows.count - before.step_rows.count
    return {
        "running": now.num_running,
        "waiting": now.num_waiting,
        "slots": num_slots,
        "warm": now.num_warm,
        "batch_size": round((now.step_rows.sum - before.step_rows.sum) / num_steps, 1) if num_steps else None,
        "prompt_tokens_per_second": round(num_prompt / seconds, 1),
        "generated_tokens_per_second": round(num_generated / seconds, 1),
        "hit_rate": round(num_cached / num_prompt, 3) if num_prompt else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
