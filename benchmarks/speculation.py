"""What speculation gains: the same requests with and without it, in turns, by one engine.

    python benchmarks/speculation.py --model smollm2 --rows 1 8

Four kinds of work: a text to be repeated with a change, an object to be written as JSON, a code edit, and free text.
Then the edit once more with its own result as the prediction, which is the most that a prediction can gain. Figures are
medians of the ratios of pairs. Whether both ways made the same tokens is checked. The last line is JSON. These are the
figures of docs/speculation.md.
"""

import argparse
import inspect
import json
import statistics
import textwrap
import time
from collections.abc import Sequence
from typing import Literal

from chairlift import LLM, SamplingParams
from chairlift.params import RequestOptions

_STORY = (
    "Once upon a time a small grey donkey lived beside a lake. Every morning the donkey carried two sacks of flour from"
    " the mill to the village, and every evening it came back along the lake with two empty sacks. One day the miller"
    " forgot to tie the sacks, and a white trail of flour led from the mill all the way to the village. The children"
    " followed the trail, found the donkey asleep under a tree beside the lake, and brought it home."
)
_RECORD = {
    "name": "Harbour cafe",
    "address": {"street": "12 Quay Road", "city": "Whitby", "postcode": "YO21 3PU"},
    "opening_hours": {"monday": "closed", "tuesday": "09:00-17:00", "wednesday": "09:00-17:00"},
    "menu": [{"dish": "fish pie", "price": 9.5}, {"dish": "crab soup", "price": 7.0}, {"dish": "scones", "price": 4.5}],
}
_CODE = inspect.getsource(textwrap.shorten)

PROMPTS = {
    "copy": f"Repeat this text word for word, but write 'river' in place of 'lake':\n\n{_STORY}",
    "json": f"Write this as indented JSON, and nothing else:\n\n{json.dumps(_RECORD)}",
    "code": f"Rename the parameter `width` of this function to `size`. Answer with the code alone.\n\n{_CODE}",
    "free": "Tell a long story about a lighthouse keeper who collects clocks.",
}


def main() -> None:
    """Measures, prints a table, and as the last line all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    figures = {}
    with LLM(arguments.model, device="cpu", speculation="ngram", max_batch_size=max(arguments.rows)) as llm:
        for num_rows in arguments.rows:
            for name, prompt in PROMPTS.items():
                figures[f"{name}, {num_rows} rows"] = measure(llm, [prompt] * num_rows, arguments)
            answer = run(llm, [PROMPTS["copy"]], arguments.tokens, "off").texts[0]
            figures[f"prediction, {num_rows} rows"] = measure(llm, [PROMPTS["copy"]] * num_rows, arguments, answer)
    for name, ratio in figures.items():
        print(f"{name:24} {ratio:.2f} times as fast")
    print(json.dumps({**vars(arguments), "ratios": figures}))


class Run:
    """What one way of serving the prompts took, and made."""

    def __init__(self, seconds: float, token_ids: list[list[int]], texts: list[str]) -> None:
        self.seconds, self.token_ids, self.texts = seconds, token_ids, texts


def measure(llm: LLM, prompts: Sequence[str], arguments: argparse.Namespace, prediction: str = "") -> float:
    """Median ratio of the time without to the time with speculation."""
    ratios = []
    for _ in range(arguments.rounds + 1):
        without = run(llm, prompts, arguments.tokens, "off")
        speculating = run(llm, prompts, arguments.tokens, "auto", prediction)
        if without.token_ids != speculating.token_ids:
            raise SystemExit("speculation has changed what is generated")
        ratios.append(without.seconds / speculating.seconds)
    return round(statistics.median(ratios[1:]), 3)  # the first pair reads the weights and learns what steps take


def run(
    llm: LLM, prompts: Sequence[str], num_tokens: int, speculation: Literal["auto", "off"], prediction: str = ""
) -> Run:
    """Answers all prompts at once: the first greedily, the others with a seed of their own."""
    params = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.3 if row else 0.0, seed=row)
        for row in range(len(prompts))
    ]
    options = RequestOptions(speculation=speculation, prediction=prediction)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    begin = time.perf_counter()
    outputs = llm.chat(conversations, params, use_tqdm=False, options=options)
    seconds = time.perf_counter() - begin
    return Run(seconds, [each.outputs[0].token_ids for each in outputs], [each.outputs[0].text for each in outputs])


if __name__ == "__main__":
    main()
