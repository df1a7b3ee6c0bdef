"""Takes data out of a sentence, as an object that surely has the right fields (server: `make serve MODEL=bundled`).

python examples/json_answer.py "Maria is 34 years old and lives in Oslo."
"""

import argparse

from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Holds what the answer must look like: the server lets the model write nothing else."""

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


def main() -> None:
    """Prints the object as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentence", nargs="?", default="Maria is 34 years old and lives in Oslo.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="bundled")
    arguments = parser.parse_args()
    with OpenAI(base_url=arguments.url, api_key="none") as client:
        reply = client.chat.completions.parse(
            model=arguments.model,
            messages=[{"role": "user", "content": f"Extract the name and age as JSON: {arguments.sentence}"}],
            response_format=Person,
            temperature=0,
        )
        person = reply.choices[0].message.parsed
    assert person is not None, "only a refusal has no object, and this server refuses nothing"
    print(person.model_dump_json())


if __name__ == "__main__":
    main()
