"""Streams a chat from a running server (`make serve`) with the official OpenAI client.

python examples/stream_chat.py "Tell me a story about a fox."
"""

import argparse

from openai import OpenAI


def main() -> None:
    """Prints the answer as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="by default the first that the server lists")
    arguments = parser.parse_args()
    with OpenAI(base_url=arguments.url, api_key="none") as client:
        model = arguments.model or client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": arguments.question}], stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
