"""Ctrl-C during `LLM.generate`: a real signal, and a call that returns what is done."""

from tests.support.server_process import run_to_end

SCRIPT = """
import os, signal, sys
from functools import partial
from chairlift import LLM, SamplingParams
from tests.support.engines import core_of

say = partial(print, file=sys.stderr)
llm = LLM("bundled", max_batch_size=2, max_seq_len=512, num_threads=1)
short, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=500, ignore_eos=True)
prompts, params = ["Once"] * 12, [short] * 2 + [long] * 10
core = core_of(llm)
step, num_steps = core.step, 0


def step_and_interrupt():
    global num_steps
    num_steps += 1
    if num_steps == 4:
        os.kill(os.getpid(), signal.SIGINT)
    return step()


core.step = step_and_interrupt
outputs = llm.generate(prompts, params, keep_on_interrupt=True)
assert num_steps >= 4
say([len(each.outputs[0].token_ids) for each in outputs[:2]])
say({str(each.outputs[0].finish_reason) for each in outputs[2:]})
say(0 < len(outputs[2].outputs[0].token_ids) < 500, outputs[-1].outputs[0].text == "")
num_steps = 0
try:
    llm.generate(prompts, params)
except KeyboardInterrupt:
    say("raised", llm.generate("Once", short)[0].outputs[0].finish_reason)
"""


def test_an_interrupted_call_returns_what_is_done_if_asked_to_and_raises_otherwise() -> None:
    code, log = run_to_end(script=SCRIPT)
    assert code == 0, log
    assert log.splitlines() == ["[1, 1]", "{'abort'}", "True True", "raised length"]
