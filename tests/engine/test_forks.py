"""An engine and a fork: the child gets a clear error or an engine of its own, and the parent's is none the worse."""

import os
import sys

import pytest

from tests.support.server_process import start_python

LEAD = """
import asyncio, os, signal, sys, time
from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.errors import EngineClosed

SETTINGS = {"max_batch_size": 2, "max_seq_len": 256, "num_threads": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=4)
SHAPED = SamplingParams(max_tokens=8, structured_outputs={"regex": "[ab]{4}"})


def text_of(llm, params=GREEDY):
    return llm.generate("Once", params, use_tqdm=False)[0].outputs[0].text


def in_child(function):
    pid = os.fork()
    if not pid:
        function()
        sys.exit(0)  # as programs do, so that finalizers run
    deadline = time.monotonic() + 100
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    assert ended[1] == 0, f"the child hung or failed: {ended[1]}"


def refused(function):
    try:
        function()
    except EngineClosed as error:
        assert f"process {os.getpid()} was forked from that; make an engine after the fork" in str(error), error
    else:
        raise AssertionError("it was not refused")
"""


def run(script: str) -> None:
    assert start_python(LEAD + script, [], os.environ, sys.stderr.fileno()).wait(300) == 0


def test_an_llm_used_before_a_fork_is_refused_in_the_child_and_goes_on_in_the_parent() -> None:
    run("""
llm = LLM(**SETTINGS)
before, shaped = text_of(llm), text_of(llm, SHAPED)
helper = llm.inputs.grammars._trials._helper.process


def child():
    refused(lambda: text_of(llm))
    refused(lambda: llm.chat([{"role": "user", "content": "hi"}]))
    refused(llm.reset_prefix_cache)
    with llm:
        pass


in_child(child)
in_child(lambda: None)
assert text_of(llm) == before
assert len(text_of(llm, SHAPED)) == len(shaped) == 4
assert helper.poll() is None, "the child ended the parent's helper"
""")


def test_a_child_of_a_process_that_has_computed_may_have_an_llm_of_its_own() -> None:
    run("""
llm = LLM(**SETTINGS)
before = text_of(llm)


def child():
    with LLM(**SETTINGS) as own:
        assert text_of(own) == before


in_child(child)
assert text_of(llm) == before
""")


def test_an_async_llm_used_before_a_fork_is_refused_in_the_child() -> None:
    run("""
async def last(llm):
    async for output in llm.generate("Once", GREEDY):
        pass
    return output.outputs[0].text


async def converse(llm):
    async for _ in llm.chat([{"role": "user", "content": "hi"}]):
        pass


async def main():
    llm = AsyncLLM(**SETTINGS)
    before = await last(llm)
    pid = os.fork()
    if not pid:
        asyncio.events._set_running_loop(None)
        for begin in (last, converse, lambda llm: llm.read_snapshot()):
            refused(lambda: asyncio.run(begin(llm)))
        assert not llm.is_healthy
        asyncio.run(llm.close())
        os._exit(0)
    for _ in range(5000):
        ended = os.waitpid(pid, os.WNOHANG)
        if ended[0]:
            break
        await asyncio.sleep(0.02)
    assert ended == (pid, 0), ended
    assert await last(llm) == before
    await llm.close()


asyncio.run(main())
""")


@pytest.mark.slow
def test_a_child_that_ends_does_not_end_the_parents_ranks() -> None:
    run("""
llm = LLM(**SETTINGS, tensor_parallel_size=2)
before = text_of(llm)
in_child(lambda: refused(lambda: text_of(llm)))
in_child(llm.close)
assert text_of(llm) == before
llm.close()
""")
