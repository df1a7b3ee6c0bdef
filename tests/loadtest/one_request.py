"""Sends requests through the real client."""

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import StreamClient, open_session
from chairlift.loadtest.records import RequestRecord
from chairlift.loadtest.runner import Player
from chairlift.loadtest.workload import build_workload


async def send_one(url: str, **settings: object) -> RequestRecord:
    """Send one request as the settings say, meant for time 1.5."""
    [record] = await play_one(url, num_requests=1, **settings)
    return record


async def play_one(url: str, **settings: object) -> list[RequestRecord]:
    """Play one conversation as the settings say, its first turn meant for time 1.5."""
    lengths = {} if "conversations" in settings else {"prompt_tokens": 5}
    config = BenchConfig.model_validate({"url": url, "output_tokens": 4} | lengths | settings)
    resolved = config.resolved("null")
    records: list[RequestRecord] = []
    async with open_session(resolved) as session:
        client = StreamClient(session, resolved.endpoint_url)
        player = Player(client, resolved, build_workload(config).conversations, records.append)
        await player.play(0, due_at=1.5)
    return records
