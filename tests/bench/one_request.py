"""Sends a single request through the real client."""

from chairlift.bench import BenchConfig
from chairlift.bench.client import StreamClient, open_session, request_bodies
from chairlift.bench.records import RequestRecord


async def send_one(url: str, **settings: object) -> RequestRecord:
    """Send one request as the settings say, meant for time 1.5."""
    fields = {"url": url, "output_tokens": 4, "prompt_tokens": 5} | settings
    config = BenchConfig.model_validate(fields).resolved("null")
    async with open_session(config) as session:
        client = StreamClient(session, config.endpoint_url)
        return await client.send(3, request_bodies(config)[0], intended_at=1.5)
