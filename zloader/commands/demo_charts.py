"""The charts of a demo run: speed, accuracy and loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zloader.commands.demo_results import DemoRun, EpochFigures, LoadingFigures
from zloader.commands.page import (
    COLD,
    LIGHT,
    MOST_LABELLED_EPOCHS,
    OVER,
    WARM,
    Chart,
    draw_rates,
    label_epoch,
    name_colours,
    rates,
    scale_speeds,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_BINS = 80  # per epoch, of the throughput
_MOST_POINTS = 500  # per epoch, of the loss


def speed_chart(run: DemoRun) -> Chart:
    """The speed of loading alone and of training, cold and warm."""
    training = [("training", epoch) for epoch in ([*run.epochs[:1], *run.epochs[1:][-1:]])]
    speeds = [*(("loading alone", each) for each in run.loading), *training]
    speeds.sort(key=lambda speed: not speed[1].cold)
    names = [f"{kind}\n{_pass(figures)}" for kind, figures in speeds]
    values = [figures.rows_per_s for _, figures in speeds]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")
        places = list(range(len(speeds)))
        for place, value, (kind, figures) in zip(places, values, speeds, strict=True):
            colour = COLD if figures.cold else WARM
            axes.plot([value], [place], "o" if kind != "training" else "s", color=colour, markersize=8)
            axes.annotate(f"{value:,.0f}", (value, place), (0, 8), textcoords="offset points", ha="center", bbox=OVER)
        scale_speeds(axes, values)
        axes.set_yticks(places, names)
        axes.set_ylim(len(speeds) - 0.5, -0.75)
        axes.set_ylabel("pass over the cells")
        axes.tick_params(axis="y", length=0)

    return Chart(
        name="speed",
        title="Loading alone, and training",
        description="; ".join(
            f"{kind}, {_pass(figures)}: {figures.rows_per_s:,.0f} cells per second" for kind, figures in speeds
        ),
        caption=f"Loading alone is measured over {run.loading[0].rows:,} cells after the training. The file and the "
        "model are small, so start-up counts, and this is not zloader's top speed.",
        draw=draw,
    )


def _pass(figures: LoadingFigures) -> str:
    epoch = f"epoch {figures.epoch}, " if isinstance(figures, EpochFigures) else ""
    return f"{epoch}{figures.source}"


def throughput(run: DemoRun, epoch: EpochFigures) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows per second of one epoch in time bins of equal width: the edges in seconds, and the values."""
    import numpy as np

    steps = [step for step in run.steps if step.epoch == epoch.epoch]
    times = np.array([epoch.started_s, *(step.done_s for step in steps)])
    rows = np.cumsum([0, *(step.rows for step in steps)])
    return rates(times.tolist(), rows.tolist(), min(_MOST_BINS, len(steps) // 3))


def throughput_chart(run: DemoRun) -> Chart:
    """The speed of training over time."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for epoch in run.epochs:
            edges, values = throughput(run, epoch)
            draw_rates(axes, edges, values, COLD if epoch.cold else WARM)
            label_epoch(axes, len(run.epochs), epoch.epoch, (edges[0] + edges[-1]) / 2)
        axes.set_ylim(0)
        axes.set_xlim(0, run.steps[-1].done_s)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("time since the start of training (seconds)")
        axes.set_ylabel("cells per second")
        _cold_and_warm(figure, run)

    return Chart(
        name="throughput",
        title="Speed of training over time",
        description="; ".join(f"epoch {e.epoch} ({e.source}) {e.rows_per_s:,.0f} cells per second" for e in run.epochs),
        caption="The gaps between epochs are the held-out passes. The speed includes the training steps.",
        draw=draw,
    )


def _cold_and_warm(figure: Any, run: DemoRun) -> None:
    """The legend of the colours in use."""
    used = {epoch.cold for epoch in run.epochs}
    known = {True: ("cold: from S3", COLD), False: ("warm: from the mirror", WARM)}
    name_colours(figure, dict(known[cold] for cold in known if cold in used))


def accuracy_chart(run: DemoRun) -> Chart:
    """The held-out accuracy after each epoch, with its standard error."""
    accuracies = [epoch.held_out_accuracy for epoch in run.epochs]
    errors = [(p * (1 - p) / e.held_out_rows) ** 0.5 for p, e in zip(accuracies, run.epochs, strict=True)]
    lowest = min(p - error for p, error in zip(accuracies, errors, strict=True))
    highest = max(p + error for p, error in zip(accuracies, errors, strict=True))
    room = max(0.2 * (highest - lowest), 0.005)
    below = run.guess_accuracy < lowest - 5 * room  # on the axis, it would hide the differences between epochs

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = figure.subplots()
        numbers = [epoch.epoch for epoch in run.epochs]
        labelled = len(numbers) <= MOST_LABELLED_EPOCHS
        axes.errorbar(numbers, accuracies, errors, fmt="o-" if labelled else "-", color=LIGHT["green"], capsize=3,
                      elinewidth=1, label="held-out accuracy", clip_on=False)  # fmt: skip
        for epoch in run.epochs if labelled else ():
            at = (epoch.epoch, epoch.held_out_accuracy)
            axes.annotate(f"{at[1]:.1%}", at, (5, 5), textcoords="offset points", bbox=OVER)
        axes.plot([], [], "--", color=LIGHT["quiet"], label=_majority(run, below=below))
        if not below:
            axes.axhline(run.guess_accuracy, color=LIGHT["quiet"], linestyle="--")
        bounds = [lowest, highest] if below else [lowest, highest, run.guess_accuracy]
        axes.set_ylim(min(bounds) - room, max(bounds) + room)
        axes.set_xlim(numbers[0] - 0.25, numbers[-1] + 0.6 * max(1, len(numbers) / MOST_LABELLED_EPOCHS))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
        axes.set_xlabel("epoch")
        axes.set_ylabel("correct predictions (% of cells)")
        figure.legend(handles=[*axes.get_legend_handles_labels()[0][::-1]], loc="outside lower left")

    return Chart(
        name="accuracy",
        title=f"Held-out accuracy of {run.label} by epoch",
        description="; ".join(f"accuracy after epoch {e.epoch} {e.held_out_accuracy:.1%}" for e in run.epochs),
        caption=f"Bars show the standard error with {run.held_out_rows:,} held-out cells. Differences within "
        "them may be chance. The axis does not begin at 0.",
        draw=draw,
    )


def _majority(run: DemoRun, *, below: bool) -> str:
    return f"majority-class accuracy {run.guess_accuracy:.1%}" + (" (below this axis)" if below else "")


def loss_chart(run: DemoRun) -> Chart:
    """The training loss by step."""

    def draw(figure: Any) -> None:
        import numpy as np
        from matplotlib.ticker import FuncFormatter

        axes = figure.subplots()
        first = 0
        for epoch in run.epochs:
            losses = np.array([step.loss for step in run.steps if step.epoch == epoch.epoch])
            parts = np.array_split(losses, min(len(losses), _MOST_POINTS))
            x = first + np.cumsum([len(part) for part in parts])
            axes.plot(x, [part.mean() for part in parts], color=COLD if epoch.cold else WARM)
            label_epoch(axes, len(run.epochs), epoch.epoch, first + (len(losses) + 1) / 2)
            first += len(losses)
            if epoch is not run.epochs[-1]:
                axes.axvline(first + 0.5, color=LIGHT["quiet"], linewidth=0.8, linestyle=(0, (4, 4)))
        logarithmic = all(step.loss > 0 for step in run.steps)
        if logarithmic:
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(0.5, first + 0.5)
        axes.set_xlabel("training step (one minibatch each)")
        axes.set_ylabel("loss (nats" + (", log scale)" if logarithmic else ")"))
        _cold_and_warm(figure, run)

    return Chart(
        name="loss",
        title="Training loss by step",
        description="; ".join(f"mean loss of epoch {e.epoch} {e.loss:.3g}" for e in run.epochs),
        caption="Dashed lines separate epochs. Lower is better.",
        draw=draw,
    )
