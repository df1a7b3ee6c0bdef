"""Measurements beside what the device allows: the lines of the table, and the verdict on each."""

from collections.abc import Sequence
from dataclasses import dataclass

from comparison.ceiling import ModelShape, Rates, Workload, decode_step, prefill
from machine import format_table
from peers.engines import OURS

from on_gpu.scale import GREEDY
from on_gpu.setup import Measurement

PREFILL_TARGET = 0.55  # of the matrix rate
CONTEST_TARGET = 3.0  # times as fast as transformers
IDLE_TARGET = 0.05  # of the time, between steps


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. `share`: what is compared with the target; at most that where `is_limit`, else at least."""

    what: str
    measured: str
    floor: str = ""
    share: float | None = None
    target: float | None = None
    is_limit: bool = False

    @property
    def verdict(self) -> str:
        if self.share is None or self.target is None:
            return ""
        is_met = self.share <= self.target if self.is_limit else self.share >= self.target
        return "met" if is_met else "missed"


def make_lines(measurements: Sequence[Measurement], shapes: dict[str, ModelShape]) -> list[Line]:
    """In the order in which they were measured. Without rates there are no floors, and so no verdicts on them."""
    rates = next((_rates(each) for each in measurements if each["kind"] == "rates"), None)
    ours = {each["workload"]: each["seconds"] for each in measurements if each.get("who") == OURS}
    return [_line(each, shapes, rates, ours) for each in measurements]


def _line(each: Measurement, shapes: dict[str, ModelShape], rates: Rates | None, ours: dict[str, float]) -> Line:
    match each["kind"]:
        case "decode":
            return _decode_line(each, shapes.get(each["shape"]), rates)
        case "first_token":
            return _first_token_line(each, shapes.get(each["shape"]), rates)
        case "served":
            return _served_line(each)
        case "prefill":
            return _prefill_line(each, shapes[each["shape"]], rates)
        case "idle":
            what = f"idle {each['shape']}, {each['rows']} rows: in all, between steps"
            return Line(what, f"{each['total']:.1%}", "", each["between_steps"], IDLE_TARGET, is_limit=True)
        case "contest":
            return _contest_line(each, ours.get(each["workload"]))
    found = _rates(each)
    return Line("memory, matrix products", f"{found.bytes_per_second / 1e9:.0f} GB/s", _flops(found.flops_per_second))


def table(lines: Sequence[Line], failures: dict[str, str]) -> str:
    """All lines, and below them what failed."""
    rows = [["", "measured", "floor", "share", "target", ""], *map(_cells, lines)]
    return "\n".join([format_table(rows), *(f"FAILED {name}: {reason}" for name, reason in failures.items())])


def _cells(line: Line) -> list[str]:
    share = "" if line.share is None else f"{line.share:.2f}"
    target = "" if line.target is None else f"{'<=' if line.is_limit else '>='} {line.target:.2f}"
    return [line.what, line.measured, line.floor, share, target, line.verdict]


def _rates(measurement: Measurement) -> Rates:
    return Rates(measurement["bytes_per_second"], measurement["flops_per_second"])


def _decode_line(each: Measurement, shape: ModelShape | None, rates: Rates | None) -> Line:
    """Without a floor for shapes whose bytes nobody counts here."""
    context = f"{each['context']}" + (f"±{each['spread']}" if each.get("spread") else "")
    sampling = "" if each.get("sampling", GREEDY) == GREEDY else f", {each['sampling']}"
    what = f"decode {each['shape']}, {each['rows']} x {context}{sampling}, {each['variant']}"
    if rates is None or shape is None:
        return Line(what, _milliseconds(each["seconds"]), target=each["target"])
    # The context grows while the clock runs; its middle stands for all of it.
    step = decode_step(shape, Workload(each["rows"], each["context"], 1), each["num_generated"])
    floor = step.seconds(rates)
    return Line(what, _milliseconds(each["seconds"]), _milliseconds(floor), floor / each["seconds"], each["target"])


def _first_token_line(each: Measurement, shape: ModelShape | None, rates: Rates | None) -> Line:
    where = f" beside {each['rows']} rows" if each["rows"] else ""
    what = f"first token {each['shape']}, {each['prompt_tokens']}{where}, {each['variant']}: in all, host"
    measured = f"{_milliseconds(each['seconds'])}, {_milliseconds(each['host_seconds'])}"
    if rates is None or shape is None or each["rows"]:
        return Line(what, measured)
    floor = prefill(shape, Workload(1, each["prompt_tokens"], 1)).seconds(rates)
    return Line(what, measured, _milliseconds(floor), floor / each["seconds"])


def _served_line(each: Measurement) -> Line:
    summary = each["summary"]
    ttft, itl = summary["ttft_ms"], summary["itl_ms"]
    return Line(
        f"served {each['shape']}, {each['load']}, {each['variant']}: tokens/s, TTFT p50 and p99, ITL p99",
        f"{summary['output_token_throughput']:.0f}, {ttft['p50']:.1f} and {ttft['p99']:.1f} ms, {itl['p99']:.1f} ms",
    )


def _prefill_line(each: Measurement, shape: ModelShape, rates: Rates | None) -> Line:
    what = f"prefill {each['shape']}, {each['workload']}"
    if rates is None:
        return Line(what, _milliseconds(each["seconds"]), target=PREFILL_TARGET)
    achieved = prefill(shape, Workload.parse(each["workload"])).num_flops / each["seconds"]
    share = achieved / rates.flops_per_second
    return Line(what, _flops(achieved), _flops(rates.flops_per_second), share, PREFILL_TARGET)


def _contest_line(each: Measurement, ours: float | None) -> Line:
    what = f"{each['workload']}, {each['who']}"
    if each["who"] == OURS or ours is None:
        return Line(what, f"{each['seconds']:.3f} s")
    return Line(what, f"{each['seconds']:.3f} s", f"{ours:.3f} s", each["seconds"] / ours, CONTEST_TARGET)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s"
