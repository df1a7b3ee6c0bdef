"""/metrics tells what was really done, in a form that Prometheus takes; the documents tell of these metrics only."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from chairlift.api import ServerConfig
from chairlift.api.telemetry.pace import Paced
from tests.api.conftest import SLOTS, Server, in_loop
from tests.api.contract import CHAT, COMPLETIONS, post, user
from tests.api.fault_support import forward_of, held, serving, until_idle
from tests.engine.async_support import wait_until

PATH = "/metrics"
_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Scrape:
    """One reply, by family; the parser leaves `_total` out of counters' names, and keeps it in those of samples."""

    families: Mapping[str, Metric]

    @property
    def names(self) -> set[str]:
        """As they are asked for in queries, without the suffixes of histograms."""
        return {f"{name}_total" if metric.type == "counter" else name for name, metric in self.families.items()}

    @property
    def samples(self) -> list[Sample]:
        return [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        found = [sample.value for sample in self.samples if sample.name == name and sample.labels == labels]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def values(self, name: str, label: str) -> dict[str, float]:
        """The values of all samples of a name, by the value of a label."""
        return {sample.labels[label]: sample.value for sample in self.samples if sample.name == name}

    def outcomes(self) -> dict[str, float]:
        """Returns the outcomes of requests that there were."""
        return {name: value for name, value in self.values("chairlift_requests_total", "outcome").items() if value}


async def scrape(server: Server) -> Scrape:
    """Returns what a Prometheus server would get now."""
    async with aiohttp.ClientSession() as http, http.get(server.url + PATH) as response:
        assert response.status == 200
        text = await response.text()
    return Scrape({family.name: family for family in text_string_to_metric_families(text)})


def metrics_named_in(text: str) -> set[str]:
    """Names of metrics that a text speaks of, without the suffixes of histograms."""
    found = re.findall(r"\b(?:chairlift|process)_[a-z_]*[a-z]\b", text)
    return {next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name) for name in found}


ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
SIX = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
LONG = {**SIX, "max_tokens": 400}


@in_loop
async def server() -> AsyncIterator[Server]:
    """That has counted nothing."""
    async with serving(max_queue_size=2) as server:
        yield server


async def test_an_engine_that_has_done_nothing_says_so_in_families_with_a_type_and_a_help(server: Server) -> None:
    seen = await scrape(server)
    assert len(seen.families) > 20
    for name, family in seen.families.items():
        assert name.startswith(("chairlift_", "process_")), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert len(family.documentation) > 10, name
    assert seen.values("chairlift_slots", "state") == {"free": SLOTS, "warm": 0, "prefilling": 0, "decoding": 0}
    outcomes = ["stop", "length", "abort", "timeout", "error", "rejected"]
    assert seen.values("chairlift_requests_total", "outcome") == dict.fromkeys(outcomes, 0)
    assert seen.value("chairlift_engine_up") == 1
    assert seen.value("chairlift_generated_tokens_total") == 0
    info = seen.families["chairlift_engine_info"].samples[0].labels
    assert (info["model"], info["max_batch_size"], info["dtype"]) == ("bundled", str(SLOTS), "float32")


async def test_tokens_steps_and_times_are_those_of_the_requests(server: Server) -> None:
    for _ in range(2):
        await post(server, COMPLETIONS, SIX)
    seen = await scrape(server)
    expected = dict.fromkeys(["generated_tokens_total", "step_rows_count", "step_rows_sum"], 12)
    expected |= {"prompt_tokens_total": 16, "cached_tokens_total": 7, "step_tokens_sum": (8 + 5) + (1 + 5)}
    expected |= {"step_duration_seconds_count": 12, "inter_token_latency_seconds_count": 10}
    once = ("time_to_first_token_seconds", "queue_time_seconds", "request_duration_seconds")
    expected |= {f"{name}_count": 2 for name in once}
    expected |= {"request_prompt_tokens_sum": 16, "request_generated_tokens_sum": 12}
    assert {name: seen.value(f"chairlift_{name}") for name in expected} == expected
    assert seen.value("chairlift_requests_total", outcome="length") == 2
    assert seen.value("chairlift_slots", state="warm") == 1
    sums = ("time_to_first_token", "request_duration", "step_duration", "inter_token_latency")
    first, whole, steps, tokens = (seen.value(f"chairlift_{name}_seconds_sum") for name in sums)
    assert 0 < first < first + tokens <= whole
    assert 0 < steps <= whole


async def test_routers_find_vllms_names_where_they_are_wanted() -> None:
    """As the Gateway API inference extension, llm-d and vLLM's production stack ask for them."""
    async with serving(ServerConfig(vllm_metrics=True)) as server:
        for _ in range(2):
            await post(server, COMPLETIONS, SIX)
        seen = await scrape(server)
        cache_tokens = server.llm.config.cache_tokens
    now = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
    expected = dict.fromkeys(now, 0) | {"gpu_prefix_cache_hit_rate": 7 / 16}
    for name in ("prefix_cache", "gpu_prefix_cache"):
        expected |= {f"{name}_queries_total": 16, f"{name}_hits_total": 7}
    assert {name: seen.value(f"vllm:{name}", model_name="bundled") for name in expected} == expected
    size = {"model_name": "bundled", "block_size": "16", "num_gpu_blocks": str(cache_tokens // 16)}
    assert seen.value("vllm:cache_config_info", **size) == 1


async def test_every_choice_has_an_outcome_of_its_own_and_buckets_grow_to_the_count(server: Server) -> None:
    await post(server, COMPLETIONS, {**SIX, "prompt": ["a", "b"], "n": 2})
    await post(server, CHAT, {"messages": user("What is 17 + 25?"), "temperature": 0})
    await post(server, COMPLETIONS, {"prompt": "1, 2, 3, 4,", "max_tokens": 40, "temperature": 0, "stop": [","]})
    seen = await scrape(server)
    assert seen.outcomes() == {"length": 4, "stop": 2}
    for name, family in seen.families.items():
        if family.type == "histogram":
            buckets = [sample for sample in family.samples if sample.name == f"{name}_bucket"]
            bounds = [float(sample.labels["le"]) for sample in buckets]
            counts = [sample.value for sample in buckets]
            assert bounds == sorted(set(bounds))
            assert bounds[-1] == float("inf")
            assert counts == sorted(counts), name
            assert counts[-1] == seen.value(f"{name}_count"), name
            assert (counts[-1] > 0) == (name != "chairlift_state_distance_tokens"), name  # this model has no states


async def test_who_is_turned_away_leaves_fails_or_runs_out_of_time_is_counted_as_that() -> None:
    async with serving(max_batch_size=1, max_queue_size=0) as server, aiohttp.ClientSession() as http:
        with held(forward_of(server.llm), "hidden") as gate:
            leaving = asyncio.create_task(http.post(server.url + COMPLETIONS, json={**LONG, "stream": True}))
            await gate.entered()
            refused = asyncio.create_task(post(server, COMPLETIONS, SIX, status=429))
            await wait_until(lambda: server.llm.num_unfinished == 2, "both have come")
            gate.open()
            await refused
            (await leaving).close()
            await until_idle(server, server.llm.config.num_slots)
        await post(server, COMPLETIONS, {**LONG, "timeout": 0.02})
        seen = await scrape(server)
        assert seen.outcomes() == {"abort": 1, "timeout": 1, "rejected": 1}
        assert seen.value("chairlift_http_responses_total", path=COMPLETIONS, status="429") == 1
        assert seen.value("chairlift_request_duration_seconds_count") == 0


async def test_who_loses_its_place_in_the_queue_gets_a_429_and_counts_as_rejected() -> None:
    async with serving(max_batch_size=1, max_queue_size=2) as server, aiohttp.ClientSession() as http:
        with held(forward_of(server.llm), "hidden") as gate:
            running = asyncio.create_task(post(server, COMPLETIONS, SIX))
            await gate.entered()
            body = {**SIX, "priority": 1, "n": 2}
            patient = asyncio.create_task(http.post(server.url + COMPLETIONS, json=body))
            await wait_until(lambda: server.llm.num_unfinished == 2, "it has come")
            gate.allow()
            await gate.entered()
            urgent = asyncio.create_task(post(server, COMPLETIONS, SIX))
            await wait_until(lambda: server.llm.num_unfinished == 3, "both wait")
            gate.open()
            async with await patient as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
                error = (await response.json())["error"]
            await asyncio.gather(running, urgent)
        taken = "and a request of higher precedence displaced this one; try again later"
        assert error["message"] == f"the waiting queue is full (2 requests), {taken}"
        assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "queue_full")
        assert (await scrape(server)).outcomes() == {"length": 2, "rejected": 2}


async def test_replies_are_counted_by_path_and_status_whatever_paths_clients_make_up(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        others = ("/v1/nothing", "/../etc", "/page/nowhere.js", "/%0a", COMPLETIONS, "/page/page.js")
        for path in (*others, "/v1/models/some/other", ""):
            await http.get(server.url + path)
        await http.post(server.url + COMPLETIONS, data=b"no json", headers={"Content-Type": "application/json"})
    responses = (await scrape(server)).families["chairlift_http_responses"].samples
    counts = {f"{each.labels['path']} {each.labels['status']}": each.value for each in responses}
    models = {"/v1/models/{model} 404": 1}
    assert counts == {"other 404": 4, "other 405": 1, "other 200": 1, f"{COMPLETIONS} 400": 1, **models, "/ 200": 1}


async def test_a_scrape_waits_for_no_step_and_tells_of_who_waits_an_engine_that_hangs_and_a_dead_one() -> None:
    async with serving(step_timeout=1.0, max_batch_size=1) as server:
        with held(forward_of(server.llm), "hidden") as gate:
            readers = [asyncio.create_task(post(server, COMPLETIONS, LONG, status=500)) for _ in range(3)]
            await wait_until(lambda: server.llm.num_unfinished == 3, "all have come")
            gate.allow(3)  # only after a step the engine sees who has come during it
            for _ in range(4):
                await gate.entered()
            held_up = await scrape(server)
            await asyncio.gather(*readers)
            dead = await scrape(server)
    assert [held_up.value(f"chairlift_requests_{state}") for state in ("running", "waiting")] == [1, 2]
    assert held_up.value("chairlift_slots", state="decoding") == 1
    assert [seen.value("chairlift_engine_up") for seen in (held_up, dead)] == [1, 0]
    assert [seen.value("chairlift_generated_tokens_total") for seen in (held_up, dead)] == [3, 3]
    assert dead.outcomes() == {"error": 3}


async def test_no_key_is_asked_for_and_openmetrics_is_spoken_where_it_is_wanted_in_a_header_that_makes_sense() -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    versions = ("text/plain; version=a.b.c", "text/plain;version=", "text/plain; version=" + "9" * 5000)
    others = ("application/openmetrics-text; version=x", "*/*;q=many", ";;==,", "," * 7000, ";" * 7000, "\u00ff")
    async with serving(ServerConfig(api_key=["secret"])) as server, aiohttp.ClientSession(server.url) as http:
        async with http.get(PATH, headers={"Accept": accept}) as response:
            assert response.headers["Content-Type"].startswith(accept)
            text = await response.text()
        for nonsense in ("*/*", *versions, *others):
            async with http.get(PATH, headers={"Accept": nonsense}) as plain:
                assert plain.status == 200, nonsense
                assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4"), nonsense
                assert "chairlift_engine_up" in await plain.text()
        async with http.head(PATH) as head:
            assert head.status == 200
    names = {family.name for family in openmetrics.text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    assert {"chairlift_generated_tokens", "chairlift_step_duration_seconds"} <= names
    assert "secret" not in text


async def test_the_document_lists_the_metrics_that_there_are_with_their_labels(server: Server) -> None:
    await post(server, COMPLETIONS, SIX)
    seen = await scrape(server)
    rows = re.findall(r"^\| `([a-z_]+)(?:\{([a-z_, ]+)\})?` \| (\w+) \|", read("docs/metrics.md"), re.MULTILINE)
    told = {(name, tuple(labels.split(", ")) if labels else (), kind) for name, labels, kind in rows}
    there_are = set()
    for name, family in seen.families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if name == "chairlift_engine_info":  # whose labels are the configuration
            labels = set()
        full_name = f"{name}_total" if family.type == "counter" else name
        there_are.add((full_name, tuple(sorted(labels)), family.type))
    assert told == there_are
    assert metrics_named_in(read("docs/metrics.md")) <= seen.names
    assert metrics_named_in(read("examples/kubernetes/endpoint-picker.yaml")) <= seen.names


async def test_the_dashboard_asks_for_what_there_is_in_panels_side_by_side(server: Server) -> None:
    await post(server, COMPLETIONS, SIX)
    seen = await scrape(server)
    known = {label for sample in seen.samples for label in sample.labels} | {"instance"}
    dashboard: dict[str, Any] = json.loads(read("examples/grafana-dashboard.json"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= len(panels) >= 10
    for query in queries:
        named = metrics_named_in(query)
        assert named, query
        assert named <= seen.names, query
        labels = re.findall(r"by \(([a-z_, ]+)\)", query)
        assert {label.strip() for group in labels for label in group.split(",")} <= known, query
    assert all(panel["title"] for panel in dashboard["panels"])
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    cells = [(at["x"] + x, at["y"] + y) for at in places for x in range(at["w"]) for y in range(at["h"])]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert (len(set(cells)), len(set(ids))) == (len(cells), len(ids))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


async def test_a_flood_of_scrapes_takes_figures_ten_times_a_second(server: Server) -> None:
    times: list[float] = []

    async def read_time() -> float:
        times.append(asyncio.get_running_loop().time())
        return times[-1]

    paced = Paced(read_time, 0.1)

    async def ask_often() -> None:
        for _ in range(4):
            asked = asyncio.get_running_loop().time()
            assert await paced() >= asked

    await asyncio.gather(*(ask_often() for _ in range(100)))
    assert len(times) == 4
    assert all(later - earlier > 0.09 for earlier, later in pairwise(times))
    first, second = await asyncio.gather(server.api.service.read_metrics(), server.api.service.read_metrics())
    assert first is second


async def test_versions_that_clients_make_up_are_not_written_each(server: Server) -> None:
    metrics = await server.api.service.read_metrics()
    texts = [metrics.render(f"application/openmetrics-text; version=1.0.{minor}", 1) for minor in range(5)]
    assert {id(text) for text, _ in texts} == {id(texts[0][0])}
    assert {kind for _, kind in texts} == {"application/openmetrics-text; version=1.0.0; charset=utf-8"}
