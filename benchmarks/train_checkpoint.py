"""Train a byte-level DeepSeek-V3 model on one text.

The routers are kept in balance as DeepSeek did it: no auxiliary loss, only a bias that moves
against each expert's load.

Shape suffixes: ``B`` sequences, ``S`` bytes of a sequence, ``V`` byte values, ``L`` MoE layers,
``E`` routed experts.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from torch_eaas.errors import ConfigError

REPORT_EVERY = 50
REPORT_BYTES = 64 * 256 + 1
SAVE_EVERY = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long and how fast to train."""

    steps: int = 1500
    """Optimizer steps; the learning rate reaches zero at the last one."""

    batch: int = 8
    """Sequences in a step."""

    length: int = 256
    """Bytes in a sequence."""

    learning_rate: float = 3e-3
    """Peak of the cosine schedule."""

    warmup: int = 100
    """Steps until the peak; at most a tenth of ``steps`` is used."""

    bias_step: float = 1e-3
    """DeepSeek's gamma: how far a step moves each expert's bias against its load."""

    bias_steps: int = 300
    """First steps, in which the bias moves.

    DeepSeek-V3's bias stood still at the end too; here it does so early, since a balancer that is
    to be shown at work needs some skew.
    """

    settle_steps: int = 160
    """Steps after the training in which nothing but the bias moves.

    They bring back experts that the routers had all but left, and leave a milder skew.
    """

    seed: int = 0
    """Seeds the weights and the order of the text."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as byte ids, its last tenth held out."""

    training: Tensor
    held_out: Tensor

    @classmethod
    def read(cls, path: Path) -> "Corpus":
        """Read the file as bytes and cut it at nine tenths."""
        ids = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        cut = len(ids) * 9 // 10
        return cls(training=ids[:cut], held_out=ids[cut:])

    def batches(self, config: TrainConfig, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield training batches ``(B, S + 1)`` from random places, for ever."""
        places = torch.arange(config.length + 1)
        while True:
            starts = torch.randint(
                len(self.training) - config.length, (config.batch, 1), generator=generator
            )
            yield self.training[starts + places]


class ExpertLoad:
    """Count the tokens that each expert receives, by a hook on every router of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [m for m in model.modules() if isinstance(m, DeepseekV3TopkRouter)]
        self._counts_LE = torch.zeros(len(self.routers), self.routers[0].num_experts)
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._count, layer))

    def take(self) -> Tensor:
        """Return the counts since the last call, ``(L, E)``, and start again from zero."""
        counts_LE, self._counts_LE = self._counts_LE, torch.zeros_like(self._counts_LE)
        return counts_LE

    def _count(
        self, layer: int, router: nn.Module, inputs: object, outputs: tuple[Tensor, ...]
    ) -> None:
        chosen = outputs[2].flatten()
        self._counts_LE[layer] += torch.bincount(chosen, minlength=self._counts_LE.shape[1])

    def balance(self, counts_LE: Tensor, bias_step: float) -> None:
        """Move each expert's bias one step against its load (DeepSeek-V3 report, section 2.1.2)."""
        for router, counts_E in zip(self.routers, counts_LE, strict=True):
            towards_mean_E = torch.sign(counts_E.mean() - counts_E)
            router.e_score_correction_bias.add_(towards_mean_E, alpha=bias_step)


def byte_loss(model: DeepseekV3ForCausalLM, batch_BS: Tensor) -> Tensor:
    """Return the mean cross entropy of each next byte, in nats."""
    logits_BSV = model(input_ids=batch_BS[:, :-1], use_cache=False).logits
    return cross_entropy(logits_BSV.flatten(0, 1), batch_BS[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: DeepseekV3ForCausalLM, text: Tensor, length: int) -> float:
    """Return the loss over a text's windows of ``length`` bytes, in nats a byte."""
    windows = text.unfold(0, length + 1, length)
    losses = [byte_loss(model, batch_BS) * len(batch_BS) for batch_BS in torch.split(windows, 8)]
    return float(torch.stack(losses).sum() / len(windows))


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the rate of a step: a linear warm-up, then half a cosine down to zero."""
    warmup = max(1, min(config.warmup, config.steps // 10))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """A model, its optimizer and its place in the text, which one file can hold.

    Args:
        corpus: What to learn from.
        config: How to train.
        model: The model's sizes.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig, model: DeepseekV3Config) -> None:
        if len(corpus.held_out) <= config.length:
            raise ConfigError(
                f"the last tenth of the text has {len(corpus.held_out)} bytes, but one sequence "
                f"needs {config.length + 1}: give a longer text or shorter sequences"
            )
        torch.manual_seed(config.seed)
        self.config = config
        self.corpus = corpus
        self.model = DeepseekV3ForCausalLM(model)
        self.load = ExpertLoad(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1
        )
        self.generator = torch.Generator().manual_seed(config.seed)
        self.step = 0

    def save(self, path: Path) -> None:
        """Write everything that a later run needs to go on from here."""
        state = {
            "config": asdict(self.config),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }
        # a crash while writing leaves the older file whole
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from a saved state.

        Raises:
            ConfigError: The state was saved under another configuration.
        """
        state = torch.load(path, weights_only=True)
        if state["config"] != asdict(self.config):
            raise ConfigError(
                f"{path} was saved with {state['config']}, not {asdict(self.config)}: "
                "give the same options, or another --state"
            )
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])

    def advance(self, batch_BS: Tensor) -> tuple[float, Tensor]:
        """Take one optimizer step; return its loss and each expert's load, ``(L, E)``."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        loss = byte_loss(self.model, batch_BS)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        counts_LE = self.load.take()
        if self.step < self.config.bias_steps:
            self.load.balance(counts_LE, self.config.bias_step)
        self.step += 1
        return float(loss.detach()), counts_LE

    def run(self, state: Path | None = None) -> None:
        """Train to the last step, print progress, and save to ``state`` now and then."""
        started, first = time.monotonic(), self.step
        batches = self.corpus.batches(self.config, self.generator)
        seen_LE = self.load.take()
        while self.step < self.config.steps:
            loss, counts_LE = self.advance(next(batches))
            seen_LE += counts_LE
            last = self.step == self.config.steps
            if self.step % REPORT_EVERY == 0 or last:
                seconds = (time.monotonic() - started) / (self.step - first)
                self._report(loss, seen_LE, seconds)
                seen_LE.zero_()
            if state is not None and (self.step % SAVE_EVERY == 0 or last):
                self.save(state)
        self._settle(batches)

    @torch.no_grad()
    def _settle(self, batches: Iterator[Tensor]) -> None:
        for _ in range(self.config.settle_steps):
            byte_loss(self.model, next(batches))
            self.load.balance(self.load.take(), self.config.bias_step)

    def _report(self, loss: float, seen_LE: Tensor, seconds: float) -> None:
        held_out = evaluate(self.model, self.corpus.held_out[:REPORT_BYTES], self.config.length)
        self.load.take()
        print(
            f"step {self.step}/{self.config.steps}: loss {loss:.3f}, held out {held_out:.3f}, "
            f"load {skews(seen_LE)}, {seconds:.2f} s a step",
            flush=True,
        )


def skews(counts_LE: Tensor) -> str:
    """Return each layer's largest and smallest load over its mean.

    Example:
        ``[[2, 1, 0, 1]]`` gives ``"2.00 (0.00)"``.
    """
    relative_LE = counts_LE / counts_LE.mean(dim=1, keepdim=True)
    return ", ".join(f"{row.max():.2f} ({row.min():.2f})" for row in relative_LE)
