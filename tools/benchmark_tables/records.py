"""Says what a table has a row for: a benchmark's JSON as a list of records."""

from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

from .cells import speed

Records = Callable[[Any], Sequence[Any]]


def at(*path: str) -> Records:
    """The list at these keys."""

    return lambda data: list(_inside(data, path))


def named(*path: str) -> Records:
    """The dictionary at these keys: each entry's fields, with its key as `name`."""
    return lambda data: [{"name": key, **fields} for key, fields in _inside(data, path).items()]


def _inside(data: Any, path: Sequence[str]) -> Any:
    for key in path:
        data = data[key]
    return data


def trials(*workloads: str, is_with_start: bool = False) -> Records:
    """The workloads of `compare.py`, these or all by their size, and the engines' start and memory if asked for."""

    def records(data: Any) -> Sequence[Any]:
        found = [trial for trial in data["results"] if not workloads or trial["workload"] in workloads]
        by_size = sorted(found, key=lambda trial: (trial["unit"], int(trial["workload"].split("x")[0])))
        return by_size + (_start(data["engines"]) if is_with_start else [])

    return records


def _start(engines: Any) -> list[Any]:
    def row(name: str, field: str, factor: float) -> Any:
        return {"workload": name, "engines": {key: {"median": each[field] * factor} for key, each in engines.items()}}

    return [row("start to first token, s", "first_token_s", 1), row("peak memory, GB", "peak_bytes", 1e-9)]


def trials_of_runs(data: Any) -> Sequence[Any]:
    """The same of a file with several runs, each with its label and commit."""
    return [{**trial, "run": label, "commit": run["commit"]} for label, run in data.items() for trial in run["results"]]


def beginnings(data: Any) -> Sequence[Any]:
    """The servers of each run of `common_beginning.py`, by the length that prompts have in common."""
    return [
        {"format": label, "length": int(length), "server": server, **times}
        for label, run in data.items()
        for length, servers in run["results"].items()
        for server, times in servers.items()
    ]


def formats(data: Any) -> Sequence[Any]:
    """The number formats that `formats.py` compared at one level: bits, perplexity, speeds and memory."""
    level = next(iter(data["engines"])).split()[0]
    return [
        {
            "name": name,
            **fields,
            "rates": [median(result["rates"][f"{level} {name}"]) for result in data["results"]],
            "peak_bytes": data["engines"][f"{level} {name}"]["peak_bytes"],
        }
        for name, fields in data["formats"].items()
    ]


def levels(*wanted: str) -> Records:
    """The instruction sets that `formats.py` compared, with each format's speeds."""

    def records(data: Any) -> Sequence[Any]:
        return [{"name": level, **_speeds(data, level)} for level in wanted]

    return records


def _speeds(data: Any, level: str) -> dict[str, str]:
    def shown(name: str) -> str:
        return ", ".join(speed(median(result["rates"][f"{level} {name}"])) for result in data["results"])

    return {name: shown(name) for name in data["formats"]}


def gains(data: Any) -> Sequence[Any]:
    """For each number of requests, and engine if there are several, what speculation gains on each kind of text."""
    figures = data["figures"] if "figures" in data else _figures(data["ratios"])
    found: dict[Any, Any] = {}
    for figure in figures:
        key = (figure["rows"], figure.get("engine"))
        found.setdefault(key, {"rows": key[0], "engine": key[1]})[figure["kind"]] = figure["ratio"]
    return sorted(found.values(), key=lambda record: record["rows"])


def _figures(ratios: dict[str, float]) -> list[Any]:
    """Figures of keys like "copy, 8 rows"."""
    split = [(name.removesuffix(" rows").split(", "), ratio) for name, ratio in ratios.items()]
    return [{"kind": kind, "rows": int(rows), "ratio": ratio} for (kind, rows), ratio in split]


def mean_rounds(data: Any) -> Sequence[Any]:
    """The servers of `shared_prefix.py`, with the mean duration of their rounds."""
    (result,) = data["results"]
    return [
        {"name": name, **server, "duration_s": mean(each["duration_s"] for each in server["rounds"])}
        for name, server in result["servers"].items()
    ]


def streams(data: Any) -> Sequence[Any]:
    """The cases of `host_path.py`, each with the servers that it was measured with."""
    cases = [
        {**case, **run["settings"], "server": label.partition(",")[0]}
        for label, run in data.items()
        for case in run["cases"]
    ]
    return sorted(cases, key=lambda case: (case["prompt_tokens"], case["streams"]))


def waiting(data: Any) -> Sequence[Any]:
    """Returns what a step costs the scheduler, for each kind of queue and length of it."""
    found: dict[str, Any] = {}
    for name, cost in data["microseconds"]["waiting"].items():
        length, kind = name.split(" waiting, ")
        found.setdefault(kind, {"name": kind})[length] = cost["total"]
    return list(found.values())


def of_kind(kind: str) -> Records:
    """The measurements of one kind of `gpu.py`."""
    return lambda data: [each for each in data["measurements"] if each["kind"] == kind]


def with_target(data: Any) -> Sequence[Any]:
    """The rows of the table of `gpu.py` whose share has a target, without the contest."""
    return [row for row in data["table"] if row["target"] is not None and "transformers" not in row["what"]]


_TOKENS_OF_USER = 32


def played(data: Any) -> Sequence[Any]:
    """Returns the cells of the runs of `evaluation.py`: a load with a number of users, and each server's figures.

    Without those in which a server hardly came to answer: it wrote fewer than 32 tokens for each user until the limit.
    """
    found: dict[Any, Any] = {}
    for run in data.values():
        for result in run["results"]:
            lengths = run["settings"]["loads"][result["load"]]
            named = {"load": result["load"], "lengths": lengths, "users": result["users"], "servers": {}}
            cell = found.setdefault((result["load"], result["users"]), named)
            cell["servers"][result["server"]] = result
            tokens = result["output_tokens_per_s"] * run["settings"]["limit_s"] / result["users"]
            cell["answers"] = cell.get("answers", True) and tokens >= _TOKENS_OF_USER
    return [cell for cell in found.values() if cell["answers"]]
