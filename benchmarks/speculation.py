"""Measures what speculation gains: the same requests with and without it, in turns, by one engine.

    python benchmarks/speculation.py --rows 1 2 4 8 16 32
    python benchmarks/speculation.py --shape 1b --rows 1 2 4 8 16 32 --kinds prediction free --format int8

Kinds of work: a text to be repeated with a change, an object to be written as JSON, a code edit, an object under a JSON
schema, and free text; a text again that was answered before; and one with the right answer as its prediction, which is
the most that can be gained. A shape has random weights and words for tokens, drawn at temperature 1, so that only
`free` (there is nothing to find), `again` and `prediction` say anything.

Figures are medians of the ratios of pairs. Whether both ways made the same tokens is checked. The last line is JSON.
These are the figures of docs/speculation.md.
"""

import inspect
import itertools
import json
import statistics
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import parser_of, print_report
from shapes import SHAPES, make_checkpoint, make_servable

from chairlift import LLM, SamplingParams
from chairlift.config import Quantization
from chairlift.params import RequestOptions, StructuredOutputs

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
_FIELDS = {
    "customer_full_name": {"type": "string", "maxLength": 24},
    "customer_account_number": {"type": "integer", "minimum": 1000, "maximum": 9999},
    "delivery_address_street": {"type": "string", "maxLength": 24},
    "delivery_address_city": {"type": "string", "maxLength": 16},
    "preferred_delivery_method": {"enum": ["standard_delivery", "express_delivery"]},
    "is_returning_customer": {"type": "boolean"},
    "requested_products": {
        "type": "array",
        "minItems": 3,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {
                "product_description": {"type": "string", "maxLength": 24},
                "requested_quantity": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["product_description", "requested_quantity"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False}
_CODE = inspect.getsource(textwrap.shorten)

_FREE = "Tell a long story about a lighthouse keeper who collects clocks."
PROMPTS = {
    "copy": f"Repeat this text word for word, but write 'river' in place of 'lake':\n\n{_STORY}",
    "json": f"Write this as indented JSON, and nothing else:\n\n{json.dumps(_RECORD)}",
    "code": f"Rename the parameter `width` of this function to `size`. Answer with the code alone.\n\n{_CODE}",
    "schema": "Make up an order of three things for a shop, as JSON.",
    "free": _FREE,
    "again": _FREE,
    "prediction": _FREE,
}


def main() -> None:
    """Measures, prints a table, and as the last line all figures as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape rather than a model")
    parser.add_argument("--format", choices=("bfloat16", *Quantization), default="bfloat16", help="of the weights")
    parser.add_argument("--guessed", default="auto", help="num_speculative_tokens")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model if arguments.shape is None else _make_model(arguments.shape, Path(scratch))
        settings: dict[str, Any] = {"dtype": "bfloat16", "max_seq_len": 1024, "max_batch_size": max(arguments.rows)}
        settings |= {"quantization": None if arguments.format == "bfloat16" else arguments.format}
        with LLM(model, device="cpu", speculation="ngram", num_speculative_tokens=arguments.guessed, **settings) as llm:
            contest = Contest(llm, arguments.tokens, arguments.rounds, is_chat=arguments.shape is None)
            pairs = itertools.product(arguments.kinds, arguments.rows)
            figures = [contest.measure(kind, num_rows) for kind, num_rows in pairs]
    print_report(arguments, figures=figures)


def _make_model(shape: str, directory: Path) -> str:
    """Random weights, and words for tokens: any tokens are the same again after their way through text, as bytes are
    not, which need not be characters.
    """
    weights = make_checkpoint(shape, directory / "weights")
    return str(make_servable(weights, directory / "model", max_positions=1024))


@dataclass(frozen=True, slots=True)
class Run:
    """Holds what one way of serving the prompts took, and made."""

    seconds: float
    answers: list[tuple[list[int], str]]  # tokens and text of each
    num_accepted: int
    num_rejected: int


class Contest:
    """The same requests with and without speculation."""

    def __init__(self, llm: LLM, num_tokens: int, num_rounds: int, is_chat: bool) -> None:
        self._llm, self._num_tokens, self._num_rounds, self._is_chat = llm, num_tokens, num_rounds, is_chat
        self._num_tenants = itertools.count()  # a new one has been given no answer yet

    def measure(self, kind: str, num_rows: int) -> dict[str, Any]:
        """The median ratio of the time without to the time with speculation, and what was guessed."""
        pairs = [self._take_turns(kind, num_rows) for _ in range(self._num_rounds + 1)][1:]  # the first one learns
        ratio = statistics.median(without.seconds / speculating.seconds for without, speculating in pairs)
        num_tokens = sum(len(tokens) for tokens, _ in pairs[0][0].answers)
        last = pairs[-1][1]
        print(
            f"{kind:10} {num_rows:3} rows: {ratio:.2f} times as fast,"
            f" {last.num_accepted} of {last.num_accepted + last.num_rejected} guessed tokens right, of {num_tokens}",
            flush=True,
        )
        return {
            "kind": kind,
            "rows": num_rows,
            "ratio": round(ratio, 3),
            "without_tokens_per_s": round(statistics.median(num_tokens / each.seconds for each, _ in pairs), 1),
            "tokens": num_tokens,
            "accepted": last.num_accepted,
            "rejected": last.num_rejected,
        }

    def _take_turns(self, kind: str, num_rows: int) -> tuple[Run, Run]:
        """Both begin with a prompt that is warm, and find no answer to it in any slot."""
        tenant = str(next(self._num_tenants))
        salts = [f"{tenant} without", tenant]
        for salt in salts:
            self._run(kind, [RequestOptions(speculation="off", cache_salt=salt)], max_tokens=1)
        without = self._run(kind, [RequestOptions(speculation="off", cache_salt=salts[0])] * num_rows)
        predictions = [text if kind == "prediction" else "" for _, text in without.answers]
        options = [
            RequestOptions(tenant=f"{tenant}-{i}", prediction=text, cache_salt=salts[1])
            for i, text in enumerate(predictions)
        ]
        if kind == "again":
            self._run(kind, options)
        speculating = self._run(kind, options)
        if without.answers != speculating.answers:
            raise SystemExit("speculation has changed what is generated")
        return without, speculating

    def _run(self, kind: str, options: Sequence[RequestOptions], max_tokens: int | None = None) -> Run:
        """Answers all prompts at once: the first greedily, the others with a seed of their own, as are all of random
        weights, whose likeliest token is always the same.
        """
        structure = {"structured_outputs": StructuredOutputs(json=_SCHEMA)} if kind == "schema" else {}
        temperatures = itertools.chain([0.0], itertools.repeat(0.3)) if self._is_chat else itertools.repeat(1.0)
        params = [
            SamplingParams(
                max_tokens=max_tokens or self._num_tokens, ignore_eos=True, temperature=each, seed=row, **structure
            )
            for row, each in zip(range(len(options)), temperatures, strict=False)
        ]
        prompts = [PROMPTS[kind]] * len(options)
        begin = time.perf_counter()
        if self._is_chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = self._llm.chat(conversations, params, use_tqdm=False, options=options)
        else:
            outputs = self._llm.generate(prompts, params, use_tqdm=False, options=options)
        seconds = time.perf_counter() - begin
        choices = [output.outputs[0] for output in outputs]
        answers = [(choice.token_ids, choice.text) for choice in choices]
        num_accepted = sum(choice.num_accepted_tokens for choice in choices)
        return Run(seconds, answers, num_accepted, sum(choice.num_rejected_tokens for choice in choices))


if __name__ == "__main__":
    main()
