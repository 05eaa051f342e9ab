"""The training of pretrain.py on one rank: its steps, and the time that they waited for minibatches.

A run that is killed repeats the steps since its last checkpoint, with the same minibatches, and ends as if it had not
been killed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import zloader as zl
from benchmarks.training.pretraining import checkpoint
from benchmarks.training.pretraining.costs import costs_of, peak_flops
from benchmarks.training.pretraining.held_out import GeneMeans, held_out_losses
from benchmarks.training.pretraining.model import SHAPES, MaskedValues, Tokens, masked_loss, masked_places, predicted
from benchmarks.training.pretraining.ranks import Ranks, gpu_bytes, peak_bytes, ray_cpu_s, streamed
from benchmarks.training.pretraining.settings import N_BINS, Settings, Source, tokenizer_of, vocabulary_of

Figures = dict[str, Any]
_COUNTED = ("seconds", "wait_s", "first_wait_s", "saving_s", "steps", "rows", "tokens", "flops", "losses")
_SUMMED = ("wait_s", "cpu_s", "gets", "bytes_read")  # over all ranks, which count them apart
# What may change when a run goes on from a checkpoint.
_FREE = {"checkpoint", "checkpoint_steps", "steps", "compile", "ray_tasks", "ray_address", "peak_tflops", "probe_s"}


@dataclass(kw_only=True)
class Progress:
    """What a run has done so far. `order` is a checksum of the rows of all minibatches, in their order."""

    step: int = 0
    order: int = 0
    losses: list[float] = field(default_factory=list)
    epochs: list[Figures] = field(default_factory=list)
    current: Figures = field(default_factory=dict)  # of the epoch that has begun


class Training:
    """A model, its optimizer and its rows on one rank."""

    def __init__(self, settings: Settings, source: Source, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(ranks.local)
            torch.set_float32_matmul_precision("high")
        options = {"storage_options": source.storage_options} if source.storage_options else {}
        dataset = zl.open_dataset(source.url, cache=source.cache, **options)
        if not 0 < settings.held_out < len(dataset):
            raise SystemExit(f"--held-out must be between 1 and {len(dataset) - 1}, not {settings.held_out}")
        share = settings.held_out / len(dataset)
        train_rows, self.held_out = dataset.split([1 - share, share], seed=settings.seed)
        vocabulary = vocabulary_of(source, dataset)
        self._rows = {"store": source.name, "vocabulary": zlib.crc32(json.dumps(vocabulary, sort_keys=True).encode())}
        self.tokenizer = tokenizer_of(settings, vocabulary)
        self.n_tokens = 1 + max(self.tokenizer.vocabulary.values())
        self.loader = self._loader(train_rows, fetch_factor=settings.fetch_factor)
        self.total_steps = settings.epochs * len(self.loader)
        self.last_step = min(self.total_steps, settings.steps or self.total_steps)
        torch.manual_seed(settings.seed)
        self.model = MaskedValues(self.n_tokens, SHAPES[settings.size]).to(self.device)
        self.costs = costs_of(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.rate, betas=(0.9, 0.98), fused=self.device.type == "cuda"
        )
        self.progress = Progress()
        self.means = GeneMeans(self.n_tokens, self.device)
        self._trained = self._parallel()

    def _loader(self, rows: zl.Dataset, **options: Any) -> zl.Loader:
        settings = self.settings
        device = "cuda" if self.device.type == "cuda" else None
        options |= {"batch_size": settings.batch_size, "tokens": self.tokenizer, "seed": settings.seed}
        return zl.Loader(rows, x=None, device=device, **options)

    def _parallel(self) -> torch.nn.Module:
        """The model as it is trained: by all ranks, and compiled if wanted. It shares its parameters."""
        model: torch.nn.Module = self.model
        if self.ranks.size > 1:
            devices = [self.ranks.local] if self.device.type == "cuda" else None
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)
        return torch.compile(model) if self.settings.compile else model

    # ---- training

    def train(self) -> Figures:
        """Trains until the last epoch or step. Returns all figures, which are the same on all ranks."""
        alone, (peak, peak_is) = self._rows_per_s_alone(), self._peak()
        self._resume()
        resumed, began, cpu, ray = self.progress.step, time.perf_counter(), time.process_time(), 0.0
        with streamed(self.loader, self.settings.ray_tasks, self.settings.ray_address) as minibatches:
            while self.progress.step < self.last_step:
                self._epoch(minibatches)
            if self.settings.ray_tasks:
                ray = ray_cpu_s()
        progress = dataclasses.asdict(self.progress)
        current = progress.pop("current")
        if current:
            progress["epochs"].append(current | self._held_out())
        totals = [time.process_time() - cpu, ray, alone, peak]
        cpu, ray, alone, peak = self._sums(totals)
        return {
            "resumed_at_step": resumed,
            "wall_s": time.perf_counter() - began,
            "cpu_s": cpu,
            "ray_cpu_s": ray,
            "rows_per_s_alone": alone,
            "peak_flops": peak,
            "peak_is": peak_is,
            "peak_bytes": peak_bytes(),
            **gpu_bytes(self.device),
            "costs": dataclasses.asdict(self.costs),
            **progress,
            "epochs": [self._rates(epoch, peak) for epoch in progress["epochs"]],
        }

    def _epoch(self, minibatches: Any) -> None:
        """Trains until the end of the epoch, or until the last step of this process."""
        progress, before = self.progress, self.progress.current
        now: Figures = dict.fromkeys(_COUNTED, 0.0)
        cpu = time.process_time()

        def so_far() -> Figures:
            """The figures of the epoch, with those from before a resume."""
            loaded = minibatches.statistics()
            own = now | {"gets": loaded.gets, "bytes_read": loaded.bytes_read, "cpu_s": time.process_time() - cpu}
            own |= dict(zip(_SUMMED, self._sums([own[name] for name in _SUMMED]), strict=True))
            return {"epoch": len(progress.epochs)} | {name: before.get(name, 0) + of for name, of in own.items()}

        with contextlib.closing(iter(minibatches)) as epoch:
            while True:
                asked = time.perf_counter()
                minibatch = next(epoch, None)
                waited = time.perf_counter() - asked
                now["wait_s"] += waited
                now["first_wait_s"] = now["first_wait_s"] or waited
                if minibatch is not None:
                    self._step(minibatch, now)
                now["seconds"] += time.perf_counter() - asked
                if minibatch is None:
                    break
                stops = progress.step == self.last_step < self.total_steps
                if stops or progress.step % self.settings.checkpoint_steps == 0:
                    progress.current = so_far()
                    now["saving_s"] += self._save(minibatches)
                if stops:
                    return
        progress.epochs.append(so_far() | self._held_out())
        progress.current = {}
        self._save(minibatches)
        self._print(progress.epochs[-1])

    def _step(self, minibatch: zl.Minibatch, now: Figures) -> None:
        """One step of all ranks, and the record of it."""
        progress, tokens = self.progress, minibatch.tokens
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * self._rate_share(progress.step)
        loss = self._descend(tokens)
        self.means.add(tokens)
        checksum = zlib.crc32(minibatch.index.cpu().numpy().tobytes())
        known = (len(minibatch), tokens["lengths"].sum().item(), checksum, loss.item())
        rows, n_tokens, checksums, losses = self._sums(known)
        mean_loss = losses / self.ranks.size
        if not math.isfinite(mean_loss):
            kept = self.settings.checkpoint and ", and remove the checkpoint, which may be no better"
            raise SystemExit(f"the loss of step {progress.step} is {mean_loss}: lower --rate{kept or ''}")
        progress.step += 1
        progress.losses.append(mean_loss)
        progress.order = zlib.crc32(f"{progress.order} {checksums:.0f}".encode())
        flops = n_tokens * self.costs.flops(tokens["input_ids"].shape[1])
        for name, value in {"steps": 1, "rows": rows, "tokens": n_tokens, "flops": flops, "losses": mean_loss}.items():
            now[name] += value

    def _descend(self, tokens: Tokens) -> torch.Tensor:
        """A step of the optimizer, which masks other places than any other step. Returns the loss."""
        masked = masked_places(tokens, self.settings.masked, self.settings.seed, self.progress.step, self.ranks.rank)
        with self._autocast():
            predictions, truth = predicted(self._trained, tokens, masked, N_BINS)
        loss = masked_loss(predictions, truth, masked)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16)

    def _rate_share(self, step: int) -> float:
        """The share of the learning rate: it rises while it warms up, and then falls to 0 as a cosine."""
        warmup = min(self.settings.warmup, self.total_steps // 2)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.total_steps - warmup)))

    def held_out_minibatches(self) -> Iterator[zl.Minibatch]:
        """The held-out rows, in order."""
        return iter(self._loader(self.held_out, shuffle=False))

    def _held_out(self) -> Figures:
        began = time.perf_counter()
        with self._autocast():
            losses = held_out_losses(
                self.model, self.held_out_minibatches(), self.means.means(self.ranks), self.ranks, self.settings.masked
            )
        return {"held_out": losses, "held_out_s": time.perf_counter() - began}

    def _print(self, epoch: Figures) -> None:
        if not self.ranks.first:
            return
        held_out, seconds = epoch["held_out"], epoch["seconds"]
        print(
            f"epoch {epoch['epoch']}: {epoch['rows'] / seconds:,.0f} rows/s, waited "
            f"{epoch['wait_s'] / self.ranks.size / seconds:.1%}, {epoch['gets']:,.0f} GETs; held-out loss "
            f"{held_out['model']:.5f}, of the mean of each gene {held_out['mean of each gene']:.5f}",
            file=sys.stderr,
            flush=True,
        )

    # ---- speed

    def _rows_per_s_alone(self) -> float:
        """Rows per second of this rank on tokens that are there already. Leaves the model as it was."""
        rows, length = self.settings.batch_size, self.settings.tokens
        tokens = {
            "input_ids": torch.arange(rows * length, device=self.device).view(rows, length) % self.n_tokens,
            "values": torch.ones(rows, length, device=self.device),
            "attention_mask": torch.ones(rows, length, dtype=torch.bool, device=self.device),
        }
        saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        took: list[float] = []
        while len(took) < 4 or sum(took[2:]) < self.settings.probe_s:  # the first steps compile, and find memory
            began = time.perf_counter()
            self._descend(tokens).item()
            took += [each / self.ranks.size for each in self._sums([time.perf_counter() - began])]
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        return rows * len(took[2:]) / sum(took[2:])

    def _peak(self) -> tuple[float, str]:
        if self.settings.peak_tflops is not None:
            return self.settings.peak_tflops * 1e12, "as given"
        return peak_flops(self.device, bf16=self.settings.bf16, seconds=self.settings.probe_s)

    def _sums(self, numbers: Any) -> list[float]:
        """Sums of numbers over all ranks."""
        summed: list[float] = self.ranks.sums(torch.tensor(numbers, dtype=torch.float64, device=self.device)).tolist()
        return summed

    def _rates(self, epoch: Figures, peak: float) -> Figures:
        """The figures of an epoch with its rates, its shares, and its MFU by two counts of FLOPs."""
        seconds = epoch["seconds"]
        return epoch | {
            "source": "cold" if epoch["gets"] else "warm",
            "loss": epoch["losses"] / epoch["steps"],
            "rows_per_s": epoch["rows"] / seconds,
            "tokens_per_s": epoch["tokens"] / seconds,
            "wait_share": epoch["wait_s"] / self.ranks.size / seconds,
            "mfu": epoch["flops"] / seconds / peak,
            "mfu_six_n": self.costs.six_n * epoch["tokens"] / seconds / peak,
        }

    # ---- checkpoints

    @property
    def _identity(self) -> Figures:
        """What must be the same when a run goes on."""
        settings = {name: value for name, value in vars(self.settings).items() if name not in _FREE}
        return settings | self._rows | {"ranks": self.ranks.size, "n_tokens": self.n_tokens}

    def _save(self, minibatches: Any) -> float:
        """Writes a checkpoint, if there is a file for it. Returns the seconds that this took."""
        began = time.perf_counter()
        if self.settings.checkpoint is None:
            return 0.0
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": minibatches.state_dict(),
            "means": self.ranks.sums(self.means.totals.clone()),
            "progress": dataclasses.asdict(self.progress),
        }
        if self.ranks.first:
            checkpoint.write(Path(self.settings.checkpoint), self._identity, state)
        return time.perf_counter() - began

    def _resume(self) -> None:
        """Goes on from the checkpoint, if there is one."""
        if self.settings.checkpoint is None:
            return
        state = checkpoint.read(Path(self.settings.checkpoint), self._identity, self.device)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        if self.ranks.first:
            self.means.totals = state["means"]
        self.progress = Progress(**state["progress"])
