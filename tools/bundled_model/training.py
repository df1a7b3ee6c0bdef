"""Trains a bfloat16 Llama with float32 master weights, by Muon and AdamW, with warm-up, plateau and decay.

The same seed and number of steps give the same text in the same order and at the same rates.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from bundled_model.dataset import FIRST_STAGE, IGNORED, SECOND_STAGE, batches
from bundled_model.vocabulary import END_OF_TEXT_ID, MAX_POSITIONS, TURN_END_ID, VOCABULARY_SIZE

_WEIGHT_DECAY = 0.05
_MOMENTUM = 0.95
_BETAS = (0.9, 0.98)
_GRADIENT_NORM = 1.0
_WARMUP_STEPS = 60
_DECAY_SHARE = 0.4
_FINAL_RATE_SHARE = 0.01
_REPORT_EVERY = 50


@dataclass(frozen=True)
class Budget:
    """Says how long and how fast to train."""

    seed: int
    steps: int
    learning_rate: float
    tokens_per_batch: int
    compiled: bool
    start_from: Path | None


@dataclass
class Progress:
    """Counts what has been done so far."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0

    def line(self, steps: int) -> str:
        """Writes one line for the log, `steps` being all that there are to do."""
        remaining, speed = self.seconds * (steps / self.step - 1), self.tokens / self.seconds
        return f"step {self.step}  loss {self.loss:.4f}  {speed:.0f} tokens/s  eta {remaining / 60:.1f} min"


def model_config() -> LlamaConfig:
    """Describes the architecture of the bundled model."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[TURN_END_ID, END_OF_TEXT_ID],
        pad_token_id=END_OF_TEXT_ID,
    )


def learning_rate_share(step: int, share_done: float) -> float:
    """Warm up, hold, then fall in a straight line over the last part of the budget."""
    warm = min(1.0, (step + 1) / _WARMUP_STEPS)
    left = min(1.0, (1.0 - share_done) / _DECAY_SHARE)
    return warm * max(_FINAL_RATE_SHARE, left)


class Trainer:
    """Trains a bfloat16 model that computes, by float32 weights that the optimizers update."""

    def __init__(self, budget: Budget) -> None:
        torch.manual_seed(budget.seed)
        self.budget = budget
        self.model = LlamaForCausalLM(model_config())
        if budget.start_from is not None:
            self.model.load_state_dict(LlamaForCausalLM.from_pretrained(budget.start_from).state_dict())
        self.master = [weight.detach().clone() for weight in self.model.parameters()]
        self.model.bfloat16()
        # On a CPU and at these sizes plain attention trains faster than the fused kernel.
        self.model.set_attn_implementation("eager")
        self.optimizers = self._optimizers()
        body = self.model.model
        self.body: Callable[..., BaseModelOutputWithPast] = (
            torch.compile(body, dynamic=True) if budget.compiled else body
        )

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Makes Muon for the matrices inside the layers, AdamW for the embedding and the norms.

        In short trials this reached a lower loss than AdamW alone in as many steps.
        """
        rate = self.budget.learning_rate
        named = zip((name for name, _ in self.model.named_parameters()), self.master, strict=True)
        inner: list[torch.Tensor] = []
        outer: list[torch.Tensor] = []
        for name, weight in named:
            (inner if weight.dim() == 2 and "embed" not in name else outer).append(weight)
        return [
            torch.optim.Muon(
                inner, lr=rate, momentum=_MOMENTUM, weight_decay=_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(outer, lr=rate, betas=_BETAS, weight_decay=0.0, fused=True),
        ]

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy over the tokens to be learnt; only those go through the output layer."""
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        assert hidden is not None
        learnt = targets != IGNORED
        logits = self.model.lm_head(hidden[learnt])
        return functional.cross_entropy(logits.float(), targets[learnt])

    def step(self, ids: torch.Tensor, targets: torch.Tensor, rate: float) -> float:
        """Update the weights with one batch; returns its loss."""
        loss = self.loss(ids, targets)
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for weight, master in zip(self.model.parameters(), self.master, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(self.master, _GRADIENT_NORM)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.publish()
        return float(loss.detach())

    def publish(self) -> None:
        """Round the master weights into the model."""
        with torch.no_grad():
            for weight, master in zip(self.model.parameters(), self.master, strict=True):
                weight.copy_(master)


def train(budget: Budget, report: Callable[[str], None]) -> tuple[LlamaForCausalLM, Progress]:
    """Train a model within the budget: the first stage from nothing, the second from a model of the first."""
    stage = FIRST_STAGE if budget.start_from is None else SECOND_STAGE
    trainer = Trainer(budget)
    progress = Progress()
    started = time.monotonic()
    for ids, targets in islice(batches(budget.seed, stage, budget.tokens_per_batch), budget.steps):
        rate = budget.learning_rate * learning_rate_share(progress.step, progress.step / budget.steps)
        loss = trainer.step(ids, targets, rate)
        progress.step += 1
        progress.tokens += ids.numel()
        progress.seconds = time.monotonic() - started
        progress.loss = loss if progress.step == 1 else 0.98 * progress.loss + 0.02 * loss
        if progress.step % _REPORT_EVERY == 0:
            report(progress.line(budget.steps))
    return trainer.model, progress
