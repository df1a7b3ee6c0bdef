"""Attention over slots in Triton beside the same in plain operators: rows that decode, and rows of several tokens."""

from dataclasses import dataclass

import pytest
import torch

from chairlift.kernels import decode_attention, prefill_attention, slot_append
from tests.support.gpu import needs_gpu
from tests.support.triton_compiler import Compilation, assert_fits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 1e4
NUM_SLOTS = 7


@dataclass(frozen=True)
class Case:
    """Holds what is computed, and of which shapes."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    is_token_major: bool = False  # a token's keys and values of all layers are neighbours

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def sinks(self) -> torch.Tensor | None:
        return torch.linspace(-2, 3, self.heads, device=DEVICE) if self.has_sinks else None


CASES = {
    "plain": Case(),
    "one head": Case(3, 1, 80),
    "as many heads": Case(2, 2, 64),
    "groups of three": Case(6, 2, 96),
    "window": Case(window=5),
    "window of one": Case(window=1),
    "wide window": Case(window=4000),
    "soft cap": Case(softcap=0.7),
    "sinks": Case(has_sinks=True),
    "all of these": Case(window=9, softcap=0.7, has_sinks=True),
    "float16": Case(head_dim=64, dtype=torch.float16),
    "token by token": Case(is_token_major=True),
}


@dataclass(frozen=True)
class Slots:
    """Keys and values of one of three layers: `[n_slots, S, Hkv, D]`."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(cls, case: Case, slot_len: int) -> "Slots":
        shape = NUM_SLOTS, 2, 3, slot_len, case.kv_heads, case.head_dim
        blocks = torch.randn(shape, device=DEVICE).to(case.dtype)
        if case.is_token_major:
            blocks = blocks.permute(0, 3, 1, 2, 4, 5).contiguous().permute(0, 2, 3, 1, 4, 5)
        return cls(blocks[:, 0, 1], blocks[:, 1, 1])


def reference(case: Case, query: torch.Tensor, slots: Slots, slot: int, length: int) -> torch.Tensor:
    """Attention in float64 of a row's queries `[n, Hq, D]`, the last of which stands at key `length - 1`."""
    group = case.heads // case.kv_heads
    keys, values = (x[slot, :length].double().repeat_interleave(group, 1) for x in (slots.keys, slots.values))
    scores = torch.einsum("nhd,mhd->hnm", query.double(), keys) * case.scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    ages = torch.arange(length - len(query), length)[:, None] - torch.arange(length)
    hidden = (ages < 0) | (ages >= (case.window or length))
    scores = scores.masked_fill(hidden.to(DEVICE), -torch.inf)
    sinks = case.sinks()
    if sinks is None:
        return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)
    extended = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), dim=2)
    return torch.einsum("hnm,mhd->nhd", extended.softmax(-1)[:, :, :-1], values)


def assert_near(output: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[output.dtype]
    torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def decode(case: Case, slots: Slots, query: torch.Tensor, lengths: list[int], where: list[int]) -> torch.Tensor:
    chunks = decode_attention.plan_chunks(int32(*lengths), int32(*where), case.kv_heads, case.window)
    return decode_attention.attend(
        query, slots.keys, slots.values, chunks, scale=case.scale, softcap=case.softcap, sinks=case.sinks()
    )


def assert_decodes(case: Case, lengths: list[int], slot_len: int) -> None:
    slots, where = Slots.random(case, slot_len), [(3 * row + 1) % NUM_SLOTS for row in range(len(lengths))]
    for slot in range(NUM_SLOTS):  # what is beyond a row may be anything that is finite
        length = lengths[where.index(slot)] if slot in where else 0
        slots.keys[slot, length:], slots.values[slot, length:] = POISON, -POISON
    query = torch.randn(len(lengths), case.heads, case.head_dim, device=DEVICE).to(case.dtype)
    output = decode(case, slots, query, lengths, where)
    rows = zip(where, lengths, strict=True)
    wanted = [reference(case, query[i : i + 1], slots, slot, length) for i, (slot, length) in enumerate(rows)]
    assert output.dtype == case.dtype
    assert_near(output, torch.cat(wanted))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rows_that_decode(case: Case) -> None:
    assert_decodes(case, [300, 1, 129], 300)


@pytest.mark.parametrize("lengths", [[1], [128], [700], [40] * 7], ids=str)
def test_rows_of_one_chunk_and_of_many(lengths: list[int]) -> None:
    assert_decodes(CASES["groups of three"], lengths, max(lengths) + 3)


def test_a_row_s_neighbours_change_nothing_of_it_but_rounding() -> None:
    case = CASES["plain"]
    slots, query = Slots.random(case, 600), torch.randn(3, case.heads, case.head_dim, device=DEVICE)
    together = decode(case, slots, query, [200, 600, 17], [4, 2, 0])
    for row, (length, slot) in enumerate(((200, 4), (600, 2), (17, 0))):
        alone = decode(case, slots, query[row : row + 1], [length], [slot])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)


def assert_prefills(case: Case, rows: list[tuple[int, int]], slot_len: int) -> None:
    """`rows`: new tokens of each, and those that its slot holds with these."""
    slots, where = Slots.random(case, slot_len), [(3 * row + 1) % NUM_SLOTS for row in range(len(rows))]
    for slot, (_, length) in zip(where, rows, strict=True):
        slots.keys[slot, length:], slots.values[slot, length:] = POISON, -POISON
    num_new = [new for new, _ in rows]
    starts = [1 + sum(num_new[:row]) for row in range(len(rows) + 1)]  # the first token is no row's
    fused = torch.randn(starts[-1], 2 * case.heads, case.head_dim, device=DEVICE).to(case.dtype)
    query = fused[:, : case.heads]
    output = prefill_attention.attend(
        query,
        slots.keys,
        slots.values,
        int32(*starts),
        int32(*(length for _, length in rows)),
        int32(*where),
        max(num_new),
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks(),
    )
    for row, (new, length) in enumerate(rows):
        if new:
            taken = slice(starts[row], starts[row + 1])
            assert_near(output[taken], reference(case, query[taken], slots, where[row], length))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rows_of_several_tokens(case: Case) -> None:
    assert_prefills(case, [(40, 40), (1, 70), (0, 9), (35, 101)], 101)


@pytest.mark.parametrize(("num_tokens", "kv_heads", "head_dim"), [(4, 3, 24), (601, 3, 24), (530, 1, 80)])
def test_new_keys_and_values_go_to_their_places_and_nowhere_else(num_tokens: int, kv_heads: int, head_dim: int) -> None:
    """Runs a program for each of a few tokens; of many, one for several, the last of which has fewer."""
    assert_appends(Case(heads=4, kv_heads=kv_heads, head_dim=head_dim), num_tokens)


def assert_appends(case: Case, num_tokens: int) -> None:
    slot_len = num_tokens // NUM_SLOTS + 5
    slots = Slots.random(case, slot_len)
    wanted = slots.keys.clone(), slots.values.clone()
    fused = torch.randn(num_tokens, 2 * case.kv_heads, case.head_dim, device=DEVICE).to(case.dtype)
    key, value = fused[:, : case.kv_heads], fused[:, case.kv_heads :]
    places = torch.randperm(NUM_SLOTS * slot_len, device=DEVICE)[:num_tokens]
    where, positions = places // slot_len, places % slot_len
    slot_append.append(slots.keys, slots.values, key, value, where.int(), positions)
    wanted[0][where, positions], wanted[1][where, positions] = key, value
    assert torch.equal(slots.keys, wanted[0])
    assert torch.equal(slots.values, wanted[1])


SERVED = {
    "32 heads of 128": Case(32, 8, 128, dtype=torch.bfloat16),
    "16 heads of 256": Case(16, 8, 256, window=1024, softcap=50.0, dtype=torch.bfloat16),
    "64 heads of 64, sinks": Case(64, 8, 64, window=128, has_sinks=True, dtype=torch.bfloat16),
    "15 heads of 64": Case(15, 5, 64, dtype=torch.bfloat16),
    "32 heads of 80": Case(32, 32, 80, dtype=torch.bfloat16),
    "32 heads of 128, token by token": Case(32, 8, 128, dtype=torch.bfloat16, is_token_major=True),
    "float32": Case(32, 8, 128),
}


@needs_gpu
@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED.keys())
def test_rows_and_prompts_of_the_sizes_that_are_served(case: Case) -> None:
    assert_decodes(case, [1, 3000, 140, 1060, 77, 2047, 4096], 4096)
    assert_decodes(case, [140], 256)
    assert_appends(case, 3)
    assert_appends(case, 2047)
    assert_prefills(case, [(512, 512), (1, 2000), (130, 4000), (0, 5), (2048, 2048), (77, 77), (300, 1000)], 4096)


@needs_gpu
def test_a_recorded_step_serves_rows_of_other_slots_and_lengths() -> None:
    case = SERVED["32 heads of 128"]
    slots = Slots.random(case, 4096)
    query = torch.randn(3, case.heads, case.head_dim, device=DEVICE).to(case.dtype)
    lengths, where = int32(1, 1, 1), int32(6, 6, 6)

    def step() -> torch.Tensor:
        chunks = decode_attention.plan_chunks(lengths, where, case.kv_heads)
        return decode_attention.attend(query, slots.keys, slots.values, chunks, scale=case.scale)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for rows in ([(4096, 2), (17, 0), (1500, 5)], [(1, 3), (128, 4), (129, 1)]):
        lengths.copy_(int32(*(length for length, _ in rows)))
        where.copy_(int32(*(slot for _, slot in rows)))
        graph.replay()
        wanted = [reference(case, query[i : i + 1], slots, slot, length) for i, (length, slot) in enumerate(rows)]
        assert_near(output, torch.cat(wanted))


TYPES = {
    **dict.fromkeys(("query", "keys", "values", "output", "key", "value"), "*bf16"),
    **dict.fromkeys(("sums", "bests", "masses", "sinks"), "*fp32"),
    **dict.fromkeys(("items", "lengths", "slots", "starts", "offsets"), "*i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    **dict.fromkeys(
        ("num_rows", "num_items", "num_wanted", "num_tokens", "window", "row_stride", "query_stride"), "i32"
    ),
    **dict.fromkeys(("token_stride", "head_stride", "new_stride", "new_head_stride"), "i32"),
    **dict.fromkeys(("value_token_stride", "value_head_stride", "new_value_stride", "new_value_head_stride"), "i32"),
    **dict.fromkeys(("slot_stride", "value_slot_stride"), "i64"),
    "positions": "*i64",
}
STRIDES = "row_stride", "query_stride", "slot_stride", "token_stride", "head_stride"
TENSORS = "query", "keys", "values", "output"
APPENDED = (
    "keys",
    "values",
    "key",
    "value",
    "slot_stride",
    "token_stride",
    "head_stride",
    "new_stride",
    "new_head_stride",
)
MODELS: dict[str, dict[str, object]] = {
    "llama": {"HQ": 32, "G": 4, "D": 128, "DP": 128, "N": 64, "CAPS": False, "SINKS": False},
    "gemma": {"HQ": 16, "G": 2, "D": 256, "DP": 256, "N": 32, "CAPS": True, "SINKS": True},
}


def of_decode(name: str) -> Compilation:
    aligned, options = (*TENSORS, *STRIDES, "sums", "items"), {"num_warps": 8 if name == "gemma" else 4}
    module, constants = "chairlift.kernels.decode_attention", {**MODELS[name], "GP": 16}
    return Compilation(f"decode, {name}", module, "_attend", TYPES, constants, aligned, {**options, "num_stages": 3})


def of_prefill(name: str) -> Compilation:
    constants = {**MODELS[name], "M": 128, "WINDOWED": name == "gemma"}
    options = {"num_warps": 8, "num_stages": 2}
    title, module = f"prefill, {name}", "chairlift.kernels.prefill_attention"
    return Compilation(title, module, "_attend", TYPES, constants, (*TENSORS, *STRIDES), options, max_registers=252)


COMPILATIONS = (
    *(of_decode(name) for name in MODELS),
    *(of_prefill(name) for name in MODELS),
    Compilation(
        "plan",
        "chairlift.kernels.decode_attention",
        "_plan",
        TYPES,
        {"SHORTEST": 128, "BLOCK": 256},
    ),
    Compilation(
        "join",
        "chairlift.kernels.decode_attention",
        "_join",
        TYPES,
        {"HQ": 32, "D": 128, "DP": 128, "SINKS": False, "C": 16},
        options={"num_warps": 2},
    ),
    Compilation(
        "append",
        "chairlift.kernels.slot_append",
        "_append",
        TYPES,
        {"T": 1, "H": 8, "D": 128, "HP": 8, "DP": 128},
        options={"num_warps": 1},
    ),
    Compilation(
        "append of many",
        "chairlift.kernels.slot_append",
        "_append",
        TYPES,
        {"T": 4, "H": 8, "D": 128, "HP": 8, "DP": 128},
        APPENDED,
        {"num_warps": 4},
    ),
)


@pytest.mark.parametrize("case", COMPILATIONS, ids=lambda case: case.name)
def test_it_compiles_for_a_gpu_without_spills(case: Compilation) -> None:
    assert_fits(case, __name__)
