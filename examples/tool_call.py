"""Lets the model call a function that runs here, and answer with the result (server: `make serve MODEL=bundled`).

python examples/tool_call.py "What is the weather in Oslo?"
"""

import argparse
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)

    def run(self) -> str:
        return f"sunny and {15 + len(self.city)} degrees"


class Add(BaseModel):
    """The sum of two whole numbers."""

    a: int = Field(ge=0, le=999)
    b: int = Field(ge=0, le=999)

    def run(self) -> str:
        return str(self.a + self.b)


def main() -> None:
    """Prints the calls that the model makes, their results, and its answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is the weather in Oslo?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="bundled")
    arguments = parser.parse_args()
    tools = [pydantic_function_tool(GetWeather, name="get_weather"), pydantic_function_tool(Add, name="add")]
    messages: list[Any] = [{"role": "user", "content": arguments.question}]
    with OpenAI(base_url=arguments.url, api_key="none") as client:
        reply = client.chat.completions.parse(model=arguments.model, messages=messages, tools=tools, temperature=0)
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            function: Any = call.function.parsed_arguments  # one of the classes above, checked
            result = function.run()
            print(f"{call.function.name}({function}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if message.tool_calls:  # it is for the model to decide whether it needs one
            reply = client.chat.completions.parse(model=arguments.model, messages=messages, tools=tools, temperature=0)
        print(reply.choices[0].message.content)


if __name__ == "__main__":
    main()
