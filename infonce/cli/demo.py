"""`infonce demo`: two small encoders learn which halves of handwritten digits belong together."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table
from threadpoolctl import threadpool_limits

import infonce

from .. import spec
from ..checks.validation import human
from . import machine
from .common import (
    File,
    check_destination,
    one_line_errors,
    optional,
    progress_bar,
    stdout,
    written_whole,
)

Array = Any
HIDDEN = 256
IMAGES, HELD_OUT = 1797, 360  # of all digits, and of those that no training sees
LEARNING_RATE = 2e-3  # of the first step; it falls to 0 along half a cosine
WEIGHT_DECAY = 0.3
NOISE = 0.15  # added to training pixels, whose range is 1
LARGEST_SCALE = 100.0  # of the learned scale, as in the modules of infonce.torch


class Adam:
    """Adam (Kingma and Ba, 2015) with decoupled weight decay, in place on a list of arrays.

    Step t: p -= c mean / (sqrt(square) + 1e-8) + rate decay p, with the running means of g and of
    g^2 (they keep 0.9 and 0.999 of the last), and c = rate sqrt(1 - 0.999^t) / (1 - 0.9^t).
    """

    def __init__(self, parameters: list[Array], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.mean = [np.zeros_like(p) for p in parameters]
        self.square = [np.zeros_like(p) for p in parameters]
        self.step = 0

    def update(self, gradients: list[Array], rate: float) -> None:
        self.step += 1
        corrected = rate * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
        moments = zip(self.parameters, gradients, self.mean, self.square, strict=True)
        for p, g, mean, square in moments:
            mean += 0.1 * (g - mean)
            square += 0.001 * (g * g - square)
            p -= corrected * mean / (np.sqrt(square) + 1e-8) + rate * self.decay * p


class Encoder:
    """Half an image [N, 32] to an embedding [N, dim]: two layers, ReLU between them."""

    def __init__(self, rng: np.random.Generator, width: int, dim: int) -> None:
        def layer(n: int, m: int) -> Array:
            return (rng.standard_normal((n, m)) * np.sqrt(2 / n)).astype(np.float32)

        self.w1, self.b1 = layer(width, HIDDEN), np.zeros(HIDDEN, np.float32)
        self.w2, self.b2 = layer(HIDDEN, dim), np.zeros(dim, np.float32)
        self.parameters = [self.w1, self.b1, self.w2, self.b2]

    def forward(self, x: Array) -> Array:
        self.x = x
        self.hidden = np.maximum(x @ self.w1 + self.b1, 0)
        return self.hidden @ self.w2 + self.b2

    def backward(self, g: Array) -> list[Array]:
        """Gradients of the parameters, from the gradient of the last output."""
        hidden = (g @ self.w2.T) * (self.hidden > 0)
        return [self.x.T @ hidden, hidden.sum(0), self.hidden.T @ g, g.sum(0)]


@dataclass
class Evaluation:
    """Loss, retrieval and embeddings of the held-out pairs of halves."""

    loss: float
    # how often, from 0 to 1, (the right half of a left half, the left half of a right half) ranks
    # first, or among the first five
    top1: tuple[float, float | None]
    top5: tuple[float, float | None]
    left: Array  # embeddings of the left halves
    right: Array  # embeddings of the right halves


class Halves:
    """Two encoders, of the left and the right halves of digits, and the digits."""

    def __init__(self, digits: Any, rng: np.random.Generator, dim: int) -> None:
        order = rng.permutation(len(digits.images))
        images = (digits.images[order] / 16).astype(np.float32)
        images -= images[HELD_OUT:].mean(0)
        halves = [images[:, :, half].reshape(len(images), -1) for half in (slice(4), slice(4, 8))]
        self.classes = digits.target[order][:HELD_OUT]
        self.held_out = [half[:HELD_OUT] for half in halves]
        self.left, self.right = (half[HELD_OUT:] for half in halves)
        self.encoders = [Encoder(rng, self.left.shape[1], dim) for _ in range(2)]
        parameters = [p for encoder in self.encoders for p in encoder.parameters]
        self.adam = Adam(parameters, decay=WEIGHT_DECAY)

    def forward(self, chosen: Array, noise: Callable[[], Array] = lambda: 0.0) -> list[Array]:
        """Embeddings of the chosen digits that are not held out, with noise on their pixels."""
        sides = zip(self.encoders, (self.left, self.right), strict=True)
        return [encoder.forward(x[chosen] + noise()) for encoder, x in sides]

    def backward(self, gradients: Sequence[Array]) -> list[Array]:
        """Gradients of all parameters."""
        sides = zip(self.encoders, gradients, strict=True)
        return [g for encoder, dz in sides for g in encoder.backward(dz)]

    def evaluate(self, scale: Any, method: Any = "auto") -> Evaluation:
        """Loss and retrieval of the digits that are held out, without gradients."""
        u, v = (e.forward(x) for e, x in zip(self.encoders, self.held_out, strict=True))
        result = infonce.clip_loss_and_grad(
            u, v, scale=scale, normalize=True, method=method, wrt=(), metrics=True
        )
        assert result.metrics is not None
        return Evaluation(float(result.loss), result.metrics.top(1), result.metrics.top(5), u, v)


@dataclass
class Run:
    """The results of one training."""

    before: Evaluation
    after: Evaluation
    classes: Array  # digit of each held-out image
    scale: float
    losses: list[float] = field(default_factory=list)  # per step
    seconds: float = 0.0  # all training
    loss_seconds: list[float] = field(default_factory=list)  # per call of the loss
    loss_bytes: int = 0  # the most memory that one call of the loss allocates


@click.command()
@click.option("--epochs", type=click.IntRange(1), default=300, help="Passes over the images.")
@click.option(
    "--batch",
    type=click.IntRange(2, IMAGES - HELD_OUT),
    default=479,
    help="Pairs of each training step.",
)
@click.option("--dim", type=click.IntRange(1), default=64, help="Width of the embeddings.")
@click.option("--temperature", type=float, default=0.1, help="Temperature at the first step.")
@click.option(
    "--learn-scale/--fixed-scale",
    default=True,
    help="Learn the temperature with the encoders, or keep it.",
)
@click.option(
    "--method",
    type=click.Choice(spec.CHOICES["method"]),
    default="auto",
    help="Method of the loss: what it keeps in memory.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, help="Seed of the random number generator."
)
@click.option(
    "--output", type=File(), default="infonce-demo.png",
    help="Picture of the loss and the held-out similarities; overwritten.",
)  # fmt: skip
def demo(
    epochs: int,
    batch: int,
    dim: int,
    temperature: float,
    learn_scale: bool,
    method: str,
    seed: int,
    output: Path,
) -> None:
    """Train on handwritten digits: which halves belong together?

    Two encoders in NumPy see the left and the right half of 8x8 images as two modalities, and the
    CLIP loss brings halves of the same image together. Takes seconds on two cores.
    """
    datasets = optional("sklearn.datasets", "demo")
    figures = optional("matplotlib.figure", "demo")
    check_destination(output)
    if not 1 / LARGEST_SCALE <= temperature < np.inf:
        raise click.UsageError(
            f"--temperature: expected at least {1 / LARGEST_SCALE}, got {temperature}"
        )
    # products this small gain nothing from a second thread, and on a busy machine wait for it
    with one_line_errors(), threadpool_limits(1, user_api="blas"):
        run = train(
            datasets.load_digits(), epochs, batch, dim, 1 / temperature, learn_scale, method, seed
        )
    title = (
        f"CPU: {machine.describe_cpu(machine.cpu())}\n"
        f"batch {batch}, width {dim}, float32, {epochs} epochs, method {method}"
    )
    try:  # the picture first: to print fails if a pipe is closed
        with written_whole(output) as temporary:
            _figure(figures, run, title).savefig(temporary, format="png", dpi=120)
    finally:
        _print(run, batch, dim, method)
    click.echo(f"wrote {output}")


def train(
    digits: Any,
    epochs: int,
    batch: int,
    dim: int,
    scale: float,
    learn: bool,
    method: Any,
    seed: int,
) -> Run:
    """Train on the digits that are not held out. An epoch leaves out rows that fill no batch."""
    rng = np.random.default_rng(seed)
    halves = Halves(digits, rng, dim)
    log_scale = np.array(np.log(scale))
    scale_adam = Adam([log_scale], decay=0.0)
    before = halves.evaluate(np.exp(log_scale), method)
    run = Run(before, before, halves.classes, scale)
    rows, width = halves.left.shape
    steps = epochs * (rows // batch)
    start = time.perf_counter()
    with progress_bar() as progress:
        for epoch in range(epochs):
            shuffled = rng.permutation(rows)
            for i in range(rows // batch):
                chosen = shuffled[i * batch : (i + 1) * batch]
                u, v = halves.forward(
                    chosen, lambda: NOISE * rng.standard_normal((batch, width), np.float32)
                )
                began = time.perf_counter()
                out = infonce.clip_loss_and_grad(
                    u, v, scale=np.exp(log_scale), normalize=True, method=method
                )
                run.loss_seconds.append(time.perf_counter() - began)
                run.losses.append(float(out.loss))
                rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * len(run.losses) / steps))
                halves.adam.update(halves.backward(out.grads[:2]), rate)
                if learn:  # d loss / d log scale
                    scale_adam.update([out.grads.scale * np.exp(log_scale)], rate)
                    np.minimum(log_scale, np.log(LARGEST_SCALE), out=log_scale)
            if progress is not None:
                progress("training", epoch + 1, epochs)
    run.seconds = time.perf_counter() - start
    run.scale = float(np.exp(log_scale))
    run.after = halves.evaluate(run.scale, method)
    tracemalloc.start()
    infonce.clip_loss_and_grad(u, v, scale=run.scale, normalize=True, method=method)
    run.loss_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return run


def _print(run: Run, batch: int, dim: int, method: str) -> None:
    table = Table(title=f"{HELD_OUT} held-out pairs", title_justify="left")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("loss", f"{run.before.loss:.3f}", f"{run.after.loss:.3f}")
    for title, which, side in (
        ("right half found, top-1", "top1", 0),
        ("right half found, top-5", "top5", 0),
        ("left half found, top-1", "top1", 1),
        ("left half found, top-5", "top5", 1),
    ):
        shares = (getattr(evaluation, which)[side] for evaluation in (run.before, run.after))
        table.add_row(title, *(f"{share:.1%}" for share in shares))
    console = stdout()
    console.print(table)
    console.print(
        f"training {run.seconds:.1f} s; loss and gradient of {batch} x {dim}, method {method}: "
        f"{1e3 * float(np.median(run.loss_seconds)):.2f} ms, peak {human(run.loss_bytes)}; "
        f"scale {run.scale:.1f}"
    )


def _figure(figures: Any, run: Run, title: str) -> Any:
    """Loss by step, and the similarities of held-out halves, sorted by digit."""
    figure = figures.Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    curve, matrix = figure.subplots(1, 2)
    curve.plot(run.losses)
    curve.set(xlabel="step", ylabel="CLIP loss (nats)", title="training")
    curve.grid(alpha=0.3)

    order = np.argsort(run.classes, kind="stable")
    left, right = (
        z[order] / np.linalg.norm(z[order], axis=1, keepdims=True)
        for z in (run.after.left, run.after.right)
    )
    shown = matrix.imshow(left @ right.T, cmap="magma", vmin=-1, vmax=1, interpolation="nearest")
    ends = np.cumsum(np.bincount(run.classes, minlength=10))
    centres = ends - np.bincount(run.classes, minlength=10) / 2
    matrix.set_xticks(centres, range(10))
    matrix.set_yticks(centres, range(10))
    matrix.set(
        xlabel="right half, by digit",
        ylabel="left half, by digit",
        title=f"{len(order)} held-out pairs: top-1 {run.after.top1[0]:.0%}, "
        f"top-5 {run.after.top5[0]:.0%}",
    )
    figure.colorbar(shown, ax=matrix, label="cosine similarity")
    return figure
