"""Tiny worlds, whose every time can be reckoned by hand; breaches, which must be seen; fair shares and costs."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isnan
from typing import Any

import pytest
from simulation.costs import CPU_135M, GPU_8B, LinearCost, RooflineCost, StepShape
from simulation.figures import Spread, figures_of
from simulation.meter import Breach, Shares, Watch, fair_shares, jain
from simulation.requests import Fate
from simulation.simulation import Machine, Played, Setting, Simulation
from simulation.workload import Conversation, Prefix, Turn

from chairlift.cache.ledger import SlotLedger
from chairlift.params import SamplingParams
from chairlift.plan import RowPlan, StepPlan
from chairlift.scheduler import Policy, Request, Scheduler

SECOND_A_STEP = LinearCost(step=1.0, prompt_token=0.0, decode_row=0.0, context_token=0.0, copied_token=0.0)
POLICY = Policy(enable_prefix_caching=False)
FIRST_COME, PREFIXES = Setting("first-come", POLICY), Setting("prefixes", Policy())


def one(arrival: float, num_prompt: int, num_output: int, **others: Any) -> Conversation:
    """A conversation of one turn; what is not the turn's is the conversation's."""
    turn = {name: others.pop(name) for name in ("patience", "timeout") if name in others}
    return Conversation(arrival, (Turn(num_prompt, num_output, num_output, **turn),), **others)


def play(
    *workload: Conversation,
    num_slots: int = 1,
    budget: int = 100,
    setting: Setting = FIRST_COME,
    cost: LinearCost = SECOND_A_STEP,
    depth: int | None = None,
    slot_tokens: int = 100,
    **machine: int,
) -> Played:
    sizes = Machine(num_slots, slot_tokens, budget, **machine)
    return Simulation(iter(workload), sizes, setting, cost, depth=depth).run()


def column(played: Played, name: str) -> list[float]:
    values: list[float] = played.meter.records.column(name).tolist()
    return values


def quantiles(spread: Spread | None) -> list[float]:
    assert spread is not None
    return [spread.mean, spread.p50, spread.p90, spread.p99, spread.max]


def test_a_request_waits_for_the_slot_of_another_and_the_figures_of_that_world() -> None:
    played = play(one(0.0, 3, 2), one(0.5, 3, 3))
    assert column(played, "admission") == [0.0, 2.0]
    assert column(played, "first_token") == [1.0, 3.0]
    assert column(played, "end") == [2.0, 5.0]
    assert (played.duration, played.num_steps, played.meter.use.busy) == (5.0, 5, 5.0)
    assert (played.meter.use.backlogged, played.meter.use.backlogged_slots) == (1.0, 1.0)  # from 1.0 to 2.0

    figures = figures_of("x", played, starved_after=1.0)
    assert quantiles(figures.queueing) == pytest.approx([0.75, 0.75, 1.35, 1.485, 1.5])
    assert quantiles(figures.ttft) == pytest.approx([1.75, 1.75, 2.35, 2.485, 2.5])
    assert figures.tpot == Spread(1.0, 1.0, 1.0, 1.0, 1.0)
    assert (figures.output_tokens_per_s, figures.prompt_tokens_per_s) == (1.0, 1.2)
    assert (figures.slot_use, figures.backlogged_share, figures.num_starved) == (1.0, 0.2, 1)
    assert (figures.jain_slowdown, figures.other_tenants) == (1.0, None)
    assert figures.largest_tenant.slowdown == pytest.approx((2 / 2 + 4.5 / 3) / 2)
    assert asdict(figures)["tpot"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}  # fit for JSON


def test_a_step_takes_as_long_as_what_is_in_it_and_a_long_prompt_several() -> None:
    cost = LinearCost(step=1.0, prompt_token=0.1, decode_row=0.01, context_token=0.001, copied_token=0.0)
    # 10 prompt tokens; a row with 10 tokens in its slot; a row with 11
    assert play(one(0.0, 10, 3), cost=cost).duration == pytest.approx(2.0 + 1.02 + 1.021)
    assert column(play(one(0.0, 25, 1), budget=10), "first_token") == [3.0]


def test_a_launch_takes_as_long_as_its_steps_and_an_end_token_in_its_middle_ends_the_answer() -> None:
    played = play(one(0.0, 3, 9), max_steps_per_launch=4)
    assert (column(played, "end"), played.num_steps) == ([9.0], 3)  # 1 + 4 + 4
    turn = Turn(3, num_output_tokens=3, max_tokens=50)
    played = play(Conversation(0.0, (turn,)), max_steps_per_launch=4)
    assert column(played, "num_output_tokens") == [3.0]
    assert column(played, "end") == [5.0]  # the launch is not cut short


def test_the_clock_jumps_over_idle_times() -> None:
    played = play(one(5.0, 1, 1), one(100.0, 1, 1))
    assert (column(played, "admission"), played.duration) == ([5.0, 100.0], 101.0)


def test_a_client_that_goes_away_gives_its_slot_back_or_never_had_one() -> None:
    served = play(one(0.0, 3, 50, patience=2.5), one(0.0, 3, 1))
    waiting = play(one(0.0, 3, 5), one(0.0, 3, 5, patience=1.5))
    assert column(served, "fate") == column(waiting, "fate") == [Fate.LEFT, Fate.FINISHED]
    assert column(served, "end") == [2.5, 4.0]  # within a step, whose end frees the slot
    assert isnan(column(waiting, "admission")[0])
    assert column(play(one(0.0, 3, 3, patience=3.5)), "fate") == [Fate.FINISHED]


def test_timeouts_end_requests_in_the_queue_and_in_slots() -> None:
    played = play(one(0.0, 3, 50, timeout=3.5), one(0.0, 3, 5, timeout=2.5))
    assert column(played, "fate") == [Fate.EXPIRED, Fate.TIMED_OUT]
    assert column(played, "end") == [3.0, 4.0]  # before the next step begins
    assert column(played, "num_output_tokens") == [0.0, 4.0]


def test_a_full_queue_refuses() -> None:
    played = play(*[one(0.0, 3, 3)] * 4, max_queue_size=1)
    fates = figures_of("x", played, starved_after=60.0).fates
    assert fates == {"finished": 2, "left": 0, "timed_out": 0, "expired": 0, "refused": 2}


def test_a_turn_follows_the_answer_before_it_and_repeats_it() -> None:
    turns = (Turn(3, 2, 2), Turn(4, 1, 1, pause=10.0))
    played = play(Conversation(0.0, turns), setting=PREFIXES)
    assert column(played, "arrival") == [0.0, 12.0]
    assert column(played, "num_prompt_tokens") == [3.0, 9.0]  # 3 + 2 + 4
    assert column(played, "num_cached_tokens") == [0.0, 4.0]  # the last token said has no keys and values


def test_a_backlog_is_kept_up_whatever_the_arrival_times() -> None:
    played = play(*[one(1000.0 * i, 3, 2) for i in range(4)], depth=2)
    assert (column(played, "admission"), played.duration) == ([0.0, 2.0, 4.0, 6.0], 8.0)
    assert column(played, "arrival") == [0.0, 0.0, 1.0, 3.0]  # as soon as one of the two has a slot


def test_shared_beginnings_are_found_and_copied() -> None:
    requests = [one(10.0 * i, 5, 2, prefixes=(Prefix(1, 40),)) for i in range(3)]
    played = play(*requests, num_slots=4, setting=PREFIXES)
    assert column(played, "num_cached_tokens") == [0.0, 40.0, 40.0]
    assert figures_of("x", played, starved_after=60.0).prefix_hit_rate == pytest.approx(80 / 135)
    assert column(play(*requests, num_slots=4), "num_cached_tokens") == [0.0, 0.0, 0.0]


def test_with_recurrent_states_beginnings_are_found_where_a_state_was_kept() -> None:
    requests = [one(10.0 * i, 15, 2, prefixes=(Prefix(1, 80),)) for i in range(4)]
    played = play(*requests, num_slots=4, setting=PREFIXES, num_snapshots=4)
    assert column(played, "num_cached_tokens") == [0.0, 0.0, 80.0, 80.0]


def test_priorities_are_told_only_where_the_setting_knows_them() -> None:
    workload = [one(0.0, 3, 2), one(0.5, 3, 2, priority=1), one(0.6, 3, 2, priority=0)]
    told = play(*workload)
    played = play(*workload, setting=Setting("blind", POLICY, knows_priorities=False))
    assert (column(told, "priority"), column(played, "priority")) == ([0.0, 0.0, 1.0], [0.0, 1.0, 0.0])
    assert told.meter.use.longest_overtaking == pytest.approx(0.1)
    assert played.meter.use.longest_overtaking == 0.0
    figures = figures_of("x", played, starved_after=60.0)
    assert figures.most_urgent.num_requests == 2
    assert quantiles(figures.most_urgent.ttft)[-1] == pytest.approx(4.4)
    assert figures.less_urgent is not None
    assert quantiles(figures.less_urgent.ttft)[-1] == pytest.approx(2.5)


def tenants_ends(setting: Setting) -> list[float]:
    """Ends of a tenant's only request, after ten of another's in the queue, all of some size."""
    workload = [*[one(0.0, 400, 2, tenant="many")] * 10, one(0.0, 400, 2, tenant="one")]
    played = play(*workload, setting=setting, budget=1000, slot_tokens=1000)
    ends, tenants = column(played, "end"), column(played, "tenant")
    return [end for end, tenant in zip(ends, tenants, strict=True) if played.meter.tenants[int(tenant)] == "one"]


def test_tenants_are_told_only_where_the_setting_knows_them() -> None:
    assert tenants_ends(Setting("blind", POLICY, knows_tenants=False)) == [22.0]
    assert tenants_ends(Setting("fair", POLICY)) == [4.0]


def test_preempted_requests_end_too() -> None:
    workload = [one(0.0, 3, 9, priority=1), one(3.5, 3, 2)]
    played = play(*workload, setting=Setting("preemption", Policy(preempt_after=2)))
    assert column(played, "num_preemptions") == [0.0, 1.0]
    assert column(played, "fate") == [Fate.FINISHED, Fate.FINISHED]


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=None), max_tokens=5, seed=0)


def watch(*requests: Request, budget: int = 4) -> tuple[Scheduler, Watch]:
    slots = SlotLedger(2, 20)
    scheduler = Scheduler(slots, budget, 1, max_queue_size=10)
    scheduler.add(*requests)
    return scheduler, Watch(scheduler, slots, budget, check_every=1)


def breach(watching: Watch, rows: Sequence[RowPlan], num_decode_rows: int) -> str:
    with pytest.raises(Breach) as caught:
        watching.look_at(StepPlan(tuple(rows), num_decode_rows, 1))
    return str(caught.value)


def test_plans_against_the_rules_are_seen() -> None:
    scheduler, watching = watch(request("a"), request("b"))
    (first, second) = scheduler.schedule().rows
    assert breach(watching, [], 0) == "step 1: nothing is planned though somebody waits"
    stranger = replace(first, key=replace(first.key, tag="c"), slot=7)
    assert breach(watching, [stranger], 0) == "step 2: rows are planned in slots that are not theirs: ['c']"
    assert breach(watching, [first, first], 0) == "step 3: 6 tokens are planned, the budget is 4"
    assert breach(watching, [first], 1) == "step 4: a decode row takes more than one token"
    scheduler.placement.owner_of(second.slot).num_computed = 2
    assert breach(watching, [first], 0) == "step 5: decode rows stall: ['b']"


def test_what_is_left_behind_and_books_that_do_not_agree_are_seen() -> None:
    scheduler, watching = watch(request("a"))
    (row,) = scheduler.schedule().rows
    with pytest.raises(Breach, match="step 0: 1 requests never ended"):
        watching.look_at_end(num_alive=1)
    with pytest.raises(Breach, match="step 0: only 1 of 2 slots came back"):
        watching.look_at_end(num_alive=0)
    scheduler.placement.owner_of(row.slot).num_computed = 2
    with pytest.raises(Breach, match="step 0: a and its slot"):
        watching.look_after()


def test_jains_index() -> None:
    for values, index in [([], 1.0), ([0.0, 0.0], 1.0), ([3.0, 3.0, 3.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25)]:
        assert jain(values) == pytest.approx(index)
    assert jain([1.0, 3.0]) == pytest.approx(16 / (2 * 10))


def test_shares_are_max_min_fair() -> None:
    for demands, total, shares in [
        ([5.0, 5.0], 6.0, [3.0, 3.0]),
        ([100.0, 1.0, 2.0], 33.0, [30.0, 1.0, 2.0]),  # who asks for little gets it, and the rest is the other's
        ([10.0, 4.0, 10.0], 15.0, [5.5, 4.0, 5.5]),
        ([1.0, 2.0], 9.0, [1.0, 2.0]),
        ([], 9.0, []),
    ]:
        assert fair_shares(demands, total) == pytest.approx(shares)


def index_of(demands: dict[str, int], *served: dict[str, int]) -> float:
    """Jain's index of windows of 10 s, in each of which tenants that came at the start got so many tokens."""
    shares = Shares(window=10.0)
    for tenant, demand in demands.items():
        shares.arrive(tenant, demand, now=0.0)
    for number, tokens in enumerate(served):
        shares.serve(tokens.items(), now=10.0 * number)
    return shares.jain


def test_a_tenant_that_gets_less_than_its_share_lowers_the_index() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 100, now=0.0)
    shares.arrive("b", 100, now=0.0)
    shares.serve([("a", 30), ("b", 10)], now=5.0)  # fair were 20 each: ratios 1.5 and 0.5
    shares.serve([("a", 35), ("b", 35)], now=10.0)  # the first window is over
    assert shares.jain == pytest.approx(0.8)  # 2^2 / (2 x 2.5)


def test_windows_count_by_the_tokens_served_in_them_unless_nobody_lacks_anything() -> None:
    both = {"a": 1000, "b": 1000}
    assert index_of(both, {"a": 30, "b": 10}, {"a": 60, "b": 60}, {"a": 1}) == pytest.approx((0.8 * 40 + 120) / 160)
    assert index_of({"a": 30, "b": 10}, {"a": 30, "b": 10}, {}) == 1.0
    # Who asks for little and gets it is served fairly.
    assert index_of({"flood": 1000, "small": 5}, {"flood": 95, "small": 5}, {"flood": 100}) == pytest.approx(1.0)


def test_tokens_that_need_not_be_computed_are_no_demand() -> None:
    shares = Shares(window=10.0)
    for tenant in ("a", "b", "c"):
        shares.arrive(tenant, 1000, now=0.0)
    shares.admit("b", 990, now=0.0)  # all but 10 of its tokens were in the cache
    shares.leave("c", 1000, was_admitted=False)  # went away at once
    shares.serve([("a", 90), ("b", 10)], now=1.0)
    shares.serve([("a", 1)], now=10.0)
    assert shares.jain == pytest.approx(1.0)


def test_the_longest_that_a_tenant_waits_for_a_slot() -> None:
    shares = Shares(window=10.0)
    shares.arrive("a", 1, now=0.0)
    shares.arrive("a", 1, now=1.0)
    shares.admit("a", 0, now=2.0)  # 2 s after its first request came
    shares.admit("a", 0, now=5.0)  # 3 s after it last got one
    shares.arrive("a", 1, now=50.0)  # nobody waited in between
    shares.admit("a", 0, now=51.0)
    shares.arrive("b", 1, now=51.0)
    shares.admit("b", 0, now=52.0)
    assert shares.longest_gap == 3.0


def test_a_linear_cost_adds_up_its_parts() -> None:
    cost = LinearCost(step=1.0, prompt_token=0.1, decode_row=0.01, context_token=0.001, copied_token=0.0001)
    shape = StepShape(num_prompt_tokens=2, num_decode_rows=3, num_context_tokens=4, num_copied_tokens=5)
    assert cost.seconds(shape) == pytest.approx(1.2345)


ROOFLINE = RooflineCost(overhead=0.5, num_parameters=10, parameter_bytes=2, bytes_per_token=4, bandwidth=20, rate=100)


def test_a_roofline_takes_the_longer_of_reading_and_computing() -> None:
    for shape, seconds in [
        (StepShape(0, 1, 0), 0.5 + 1.0),  # 20 bytes of weights; 20 operations take but 0.2 s
        (StepShape(0, 1, 5), 0.5 + 2.0),  # and 20 bytes of the cache
        (StepShape(9, 1, 5), 0.5 + 2.0),  # 200 operations just hide behind them
        (StepShape(19, 1, 5), 0.5 + 4.0),  # 400 do not
        (StepShape(0, 1, 0, num_copied_tokens=5), 0.5 + 1.0 + 2.0),  # 20 bytes are read and written
    ]:
        assert ROOFLINE.seconds(shape) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("num_requests", "num_prompt", "num_output", "measured"),
    [(1, 128, 128, 1.146), (8, 128, 128, 1.604), (32, 128, 128, 3.223), (1, 1024, 1, 0.142), (32, 1024, 64, 7.81)],
)
def test_the_fitted_cost_gives_the_times_it_was_fitted_to(
    num_requests: int, num_prompt: int, num_output: int, measured: float
) -> None:
    """benchmarks/results/compare-135m-bf16-xeon-amx-2-cores.json; prompts in steps of 1,024 tokens, then all decode."""
    num_prefill_steps = -(-num_requests * num_prompt // 1024)
    prefill = num_prefill_steps * CPU_135M.seconds(StepShape(num_requests * num_prompt // num_prefill_steps, 0, 0))
    context = num_requests * (num_prompt + num_output // 2)
    decode = (num_output - 1) * CPU_135M.seconds(StepShape(0, num_requests, context))
    assert prefill + decode == pytest.approx(measured, rel=0.03)


def test_an_8b_on_a_gpu_decodes_one_row_at_the_floor_of_reading_its_weights() -> None:
    assert GPU_8B.seconds(StepShape(0, 1, 0)) - GPU_8B.overhead == pytest.approx(3.7e-3, rel=0.01)
