"""Finds the passages of a folder's texts that fit a question best, by the vectors of a model in this process.

python examples/search_folder.py docs "How are slots reused?" --model smollm2

A model that was trained for search, such as Qwen/Qwen3-Embedding-0.6B, finds more; give --prompt "{}" for those.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chairlift import LLM

# Makes an ordinary decoder sum a text up in its last state (Jiang et al., "Scaling Sentence Embeddings with Large
# Language Models", 2023).
PROMPT = 'This text: "{}" means in one word: "'


class Passage(NamedTuple):
    path: Path
    text: str


def passages(folder: Path, size: int) -> Iterator[Passage]:
    """Yields the paragraphs of all texts in a folder, up to so many characters of each."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".md", ".txt") and path.is_file():
            paragraphs = (" ".join(each.split()) for each in path.read_text(encoding="utf-8").split("\n\n"))
            yield from (Passage(path, each[:size]) for each in paragraphs if len(each.split()) > 3)


def main() -> None:
    """Prints the best passages, the best first, with the cosines of their vectors and the question's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--prompt", default=PROMPT, help="what a text is embedded in; {} stands for the text")
    parser.add_argument("--size", type=int, default=400, help="most characters of a passage")
    parser.add_argument("--top", type=int, default=3, help="passages to print")
    arguments = parser.parse_args()
    found = list(passages(arguments.folder, arguments.size))
    texts = [arguments.question, *(each.text for each in found)]
    with LLM(arguments.model) as llm:
        outputs = llm.embed([arguments.prompt.replace("{}", text) for text in texts])
    vectors = np.array([each.embedding for each in outputs])
    vectors -= vectors.mean(axis=0)  # what all of them have in common says nothing
    cosines = vectors[1:] @ vectors[0] / np.linalg.norm(vectors[1:], axis=1) / np.linalg.norm(vectors[0])
    for index in np.argsort(-cosines)[: arguments.top]:
        passage = found[index]
        print(f"{cosines[index]:.2f}  {passage.path}: {passage.text[:160]}")


if __name__ == "__main__":
    main()
