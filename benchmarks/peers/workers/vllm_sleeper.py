"""A model executor for vLLM's server whose model sleeps: its front end, scheduler and bookkeeping are its own.

    python -m vllm.entrypoints.openai.api_server --distributed-executor-backend \\
        peers.workers.vllm_sleeper.SleepingExecutor ...

The model is loaded, so that its cache has a size, but never run: every row that has its whole prompt says the letter.
"""

from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from peers.sleeping_device import Device

_SAID = [ord("Z")]  # the bundled tokenizer's tokens are bytes


class _Arrival(Future[Any]):
    """An output that is there when the device has come so far."""

    def __init__(self, output: Any, end: float = 0.0) -> None:
        super().__init__()
        self._end = end
        self.set_result(output)

    def result(self, timeout: float | None = None) -> Any:
        Device.wait_until(self._end)
        return super().result(timeout)


class SleepingExecutor(UniProcExecutor):  # type: ignore[misc]
    """One step of the device for each of the scheduler's, beside which the next one may be scheduled."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._device = Device()
        self._prompt_lengths: dict[str, int] = {}

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for name in scheduler_output.finished_req_ids:
            self._prompt_lengths.pop(name, None)
        new, running = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        self._prompt_lengths |= {each.req_id: each.prompt_len for each in new}
        computed = {each.req_id: each.num_computed_tokens for each in new}
        computed |= zip(running.req_ids, running.num_computed_tokens, strict=True)
        names = list(scheduler_output.num_scheduled_tokens)
        said = [
            _SAID if computed[name] + count >= self._prompt_lengths[name] else []
            for name, count in scheduler_output.num_scheduled_tokens.items()
        ]
        if not names:
            return _Arrival(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        self._device.launch(scheduler_output.total_num_scheduled_tokens)
        output = ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, said)
        self._launched = _Arrival(output, self._device.end)
        return _Arrival(None) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        del grammar_output
        return self._launched if non_block else self._launched.result()
