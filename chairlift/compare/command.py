"""`chairlift compare`: opens two models, runs both over the windows of a text, and reports."""

from contextlib import ExitStack, closing
from pathlib import Path

from tqdm import tqdm

from chairlift.compare.config import CompareConfig
from chairlift.compare.divergence import Positions, Told, Whole
from chairlift.compare.report import Report, draw, print_report, write_json
from chairlift.compare.sides import Side, open_side
from chairlift.errors import ConfigurationError

OWN_TEXT = Path(__file__).with_name("text.txt")
"""The built-in text: prose, documentation and code."""


def run(config: CompareConfig) -> int:
    """Measures, prints, writes the files that are asked for; returns the exit code."""
    _check_files(config)
    text = _read(config.text or OWN_TEXT)
    with ExitStack() as stack:
        reference = open_side(config.reference, config)
        stack.enter_context(closing(reference))
        candidate = open_side(config.candidate, config)
        stack.enter_context(closing(candidate))
        report = measure(reference, candidate, text, config)
    print_report(report)
    if config.json_file is not None:
        write_json(report, config.json_file)
    if config.plot is not None:
        draw(report, config.plot)
    return 0


def measure(reference: Side, candidate: Side, text: str, config: CompareConfig) -> Report:
    """Compares both over the windows of the text.

    Windows follow each other without overlap. Each begins with the model's token for a beginning, if it expects one,
    in place of its first token; its first half is context only, and the tokens of its second half are scored. So does
    llama.cpp's perplexity tool, whose figures can be compared.
    """
    token_ids = reference.tokenize(text)
    if candidate.tokenize(text) != token_ids:
        raise ConfigurationError(
            f"{candidate.name} makes other tokens of the text than {reference.name}; only models with the same"
            " tokenizer can be compared"
        )
    size, first = config.context, config.context // 2
    starts = range(0, len(token_ids) - size + 1, size)[: config.max_windows]
    if not starts:
        raise ConfigurationError(
            f"the text has {len(token_ids)} tokens, and a window {size}; give a longer text or lower --context"
        )
    beginning = reference.beginning()
    positions, is_reduced = Positions(), False
    for start in tqdm(starts, unit="window", disable=None, delay=1.0):
        window = token_ids[start : start + size]
        if beginning is not None:
            window[0] = beginning
        ours, theirs = reference.score(window, first), candidate.score(window, first)
        _check_same_vocabulary(ours, theirs)
        is_reduced = is_reduced or isinstance(ours, Told) or isinstance(theirs, Told)
        positions.add(ours, theirs, window[first + 1 :])
    return Report(config, reference.name, candidate.name, len(token_ids), len(starts), is_reduced, positions)


def _check_same_vocabulary(reference: Whole | Told, candidate: Whole | Told) -> None:
    if isinstance(reference, Whole) and isinstance(candidate, Whole):
        sizes = reference.logprobs.shape[1], candidate.logprobs.shape[1]
        if sizes[0] != sizes[1]:
            raise ConfigurationError(
                f"the models have {sizes[0]} and {sizes[1]} tokens; their vocabularies must be equal"
            )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--text: {path} cannot be read as UTF-8: {error}") from error


def _check_files(config: CompareConfig) -> None:
    """Before anything is measured: whether the results can be written."""
    for flag, path in (("--json", config.json_file), ("--plot", config.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{flag}: there is no folder {path.absolute().parent}")
    if config.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigurationError("--plot needs matplotlib; run: pip install 'chairlift[bench]'") from error
