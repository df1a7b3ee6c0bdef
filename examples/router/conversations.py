"""Many conversations at once through a router: how much of what a replica knew already was reused, and what failed.

    python examples/router/conversations.py --url http://127.0.0.1:8000/v1 --conversations 32 --turns 6

Known are the tokens of a conversation's earlier prompt. Needs the package openai.
"""

import argparse
import asyncio
import random
from time import perf_counter
from typing import Any

import openai


async def converse(
    client: openai.AsyncOpenAI, arguments: argparse.Namespace, number: int, counts: dict[str, int]
) -> None:
    """One conversation; a turn that fails is counted, and asked again."""
    rng = random.Random(number)
    system = f"You are assistant {number}. " + " ".join(f"Rule {rng.randrange(10**6)}: be kind." for _ in range(12))
    messages: Any = [{"role": "system", "content": system}]
    model, known = (await client.models.list()).data[0].id, 0
    for turn in range(arguments.turns):
        messages.append({"role": "user", "content": f"Tell me more about number {turn}."})
        try:
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=arguments.tokens)
        except openai.APIError as error:
            counts[f"failed with {type(error).__name__}"] = counts.get(f"failed with {type(error).__name__}", 0) + 1
            messages.pop()
            continue
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        counts["answered"] += 1
        counts["known tokens"] += known
        counts["of them reused"] += min(known, (details and details.cached_tokens) or 0)
        known = answer.usage.prompt_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    arguments = parser.parse_args()
    counts = {"answered": 0, "known tokens": 0, "of them reused": 0}
    begin = perf_counter()
    async with openai.AsyncOpenAI(base_url=arguments.url, api_key="none", max_retries=0, timeout=120) as client:
        await asyncio.gather(*(converse(client, arguments, i, counts) for i in range(arguments.conversations)))
    for name, count in counts.items():
        print(f"{name}: {count}")
    print(f"reused: {counts['of them reused'] / max(1, counts['known tokens']):.1%} in {perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
