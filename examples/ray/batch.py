"""Answers every prompt of a JSONL file with Ray Data: engines in actors, whose work is done again if one dies.

    python examples/ray/batch.py prompts.jsonl answers --engines 2

Each line has "id" and "prompt"; the folder of answers gets JSONL files whose lines have "answer" too. Needs
`pip install chairlift[ray] "ray[data]"`.
"""

import argparse
from typing import Any

import ray

from chairlift import LLM, SamplingParams


class Answerer:
    """One engine. Ray Data starts a dead one anew, and gives it the batch that it had."""

    def __init__(self, model: str, max_tokens: int) -> None:
        self.llm = LLM(model)
        self.params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self.llm.generate(list(batch["prompt"]), self.params)
        return {**batch, "answer": [output.outputs[0].text for output in outputs]}


def main() -> None:
    """All batches run at once as far as there are engines; within a batch, the engine batches by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("answers", help="a folder")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1.0, help="of an engine")
    parser.add_argument("--gpus", type=float, default=0.0, help="of an engine")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    answered = ray.data.read_json(arguments.prompts).map_batches(
        Answerer,
        fn_constructor_args=(arguments.model, arguments.max_tokens),
        compute=ray.data.ActorPoolStrategy(size=arguments.engines),
        batch_size=arguments.batch_size,
        num_cpus=arguments.cpus,
        num_gpus=arguments.gpus,
    )
    answered.write_json(arguments.answers)


if __name__ == "__main__":
    main()
