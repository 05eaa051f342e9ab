"""The HTML page of pretrain.py: one file without external resources, with the look of zloader's own pages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.compare.reporting.charts import COLD, LIGHT, WARM, Chart
from benchmarks.compare.reporting.page import Report, Section, Table, try_next
from benchmarks.harness.measuring import Figures

_POINTS = 300  # of the loss curve
_BASELINE = "mean of each gene"
_HEADER = ("epoch", "rows", "rows/s", "tokens/s", "waited", "first wait, s", "CPU s", "GETs", "MB read", "MFU",
           "MFU by 6 N", "loss", "held-out loss")  # fmt: skip
_TERMS = {
    "Loss": "The mean squared error of the masked values, which are bins of the counts of a row, from 0 to 1. Held-out "
    "rows are masked in the same places after every epoch.",
    _BASELINE: "Predicts the mean of all values of the gene that were seen in training.",
    "true rates": "An oracle that knows the mean count of each gene in each cell. Nothing can do better.",
    "true programmes": "An oracle that knows the programmes of the genes, and sees the values that the model sees.",
    "waited": "The share of the time that training steps waited for minibatches. The wait for the first minibatch of "
    "an epoch is part of it, and is given apart, too.",
    "CPU s": "Processor seconds of all ranks, loading included.",
    "MFU": "FLOPs per second as a share of the peak. The model's own count has its matrix products, attention "
    "included. 6 N has 6 FLOPs per parameter and token, embeddings included. Padding does not count.",
    "rows/s alone": "Training steps on random tokens that were there already, before training.",
}


def learned(document: Figures) -> str:
    """What the model has learned, in a sentence or two."""
    held_out = document["held_out"]
    model, baseline = held_out["model"], held_out[_BASELINE]
    text = f"The held-out loss is {model:.5f}, {model / baseline:.0%} of that of the mean of each gene, {baseline:.5f}."
    for oracle in ("true programmes", "true rates") if model < baseline else ():
        if held_out.get(oracle, baseline) < baseline:
            closed = (baseline - model) / (baseline - held_out[oracle])
            text += (
                f" The model has closed {closed:.0%} of the gap to an oracle with the {oracle}, {held_out[oracle]:.5f}."
            )
    return text


def report(document: Figures, flags: Sequence[str]) -> Report:
    """The report. `flags` are the options of the command."""
    settings = {name: str(value) for name, value in document["settings"].items()}
    epochs = Table(_caption(document), _HEADER, [_row(epoch) for epoch in document["epochs"]])
    return Report(
        title=f"Pre-training {document['costs']['parameters']:,} parameters on {document['store']}",
        verdict=[learned(document)],
        tiles=_tiles(document),
        sections=[
            Section(title="Loss and speed", charts=[_losses(document), _speeds(document)]),
            Section(title="Epochs", tables=[epochs]),
            Section(title="Terms", terms={name: words for name, words in _TERMS.items() if _applies(name, document)}),
            Section(title="The run", facts=_facts(document) | settings),
            try_next(_commands(document, flags)),
        ],
    )


def _applies(term: str, document: Figures) -> bool:
    return not term.startswith("true ") or term in document["held_out"]


def _tiles(document: Figures) -> list[tuple[str, str]]:
    last = document["epochs"][-1]
    tiles = [
        (f"{last['rows_per_s']:,.0f}", f"rows/s in the last epoch ({last['source']})"),
        (f"{last['tokens_per_s']:,.0f}", "tokens/s in the last epoch"),
        (f"{last['wait_share']:.1%}", "of its time waited for minibatches"),
        (f"{last['mfu_six_n']:.1%}", "MFU by 6 FLOPs per parameter and token"),
    ]
    if "gpu_peak_bytes" in document:
        tiles.append((f"{document['gpu_peak_bytes'] / 1e9:,.1f} GB", "most memory of a GPU"))
    return tiles


def _losses(document: Figures) -> Chart:
    losses, held_out = np.array(document["losses"]), document["held_out"]
    ends = np.cumsum([epoch["steps"] for epoch in document["epochs"]])
    of_epochs = [epoch["held_out"]["model"] for epoch in document["epochs"]]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        edges = np.linspace(0, len(losses), 1 + min(_POINTS, len(losses))).astype(int)
        means = np.add.reduceat(losses, edges[:-1]) / np.diff(edges)
        axes.plot((edges[1:] + edges[:-1]) / 2, means, color=COLD, alpha=0.5, linewidth=1, label="training")
        axes.plot(ends, of_epochs, "o-", color=WARM, markersize=4, label="held-out rows")
        axes.axhline(held_out[_BASELINE], color=LIGHT["quiet"], linestyle="--", label=_BASELINE)
        for oracle, colour in (("true programmes", LIGHT["green"]), ("true rates", LIGHT["purple"])):
            if oracle in held_out:
                axes.axhline(held_out[oracle], color=colour, linestyle=":", label=f"oracle: {oracle}")
        axes.set_ylim(0, 1.3 * max(held_out[_BASELINE], *of_epochs))
        axes.set_xlim(0, len(losses))
        axes.set_xlabel("step")
        axes.set_ylabel("mean squared error")
        figure.legend(loc="outside lower left", ncols=2)

    return Chart(
        name="loss",
        title="Loss of masked values",
        description="; ".join(f"after epoch {epoch}: {loss:.5f}" for epoch, loss in enumerate(of_epochs)),
        caption=f"Training losses are means of {max(1, len(losses) // _POINTS)} steps. Higher ones are cut off.",
        draw=draw,
    )


def _speeds(document: Figures) -> Chart:
    epochs, alone = document["epochs"], document["rows_per_s_alone"]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for source, colour in (("cold", COLD), ("warm", WARM)):
            chosen = [epoch for epoch in epochs if epoch["source"] == source]
            numbers = [epoch["epoch"] for epoch in chosen]
            if chosen:
                axes.bar(numbers, [each["rows_per_s"] for each in chosen], color=colour, alpha=0.6, label=source)
        axes.axhline(alone, color=LIGHT["quiet"], linestyle="--", label="alone, without loading")
        axes.set_ylim(0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("epoch")
        axes.set_ylabel("rows per second")
        figure.legend(loc="outside lower left", ncols=3)

    return Chart(
        name="speed",
        title="Speed of the epochs",
        description="; ".join(f"epoch {each['epoch']}: {each['rows_per_s']:,.0f} rows per second" for each in epochs),
        caption="Cold epochs read the store, warm ones the mirror.",
        draw=draw,
    )


def _caption(document: Figures) -> str:
    return f"{document['ranks']} ranks on {document['device']}, at a load of {document['load'][0]:.1f} in the end."


def _row(epoch: Figures) -> list[str]:
    name = f"{epoch['epoch']} ({epoch['source']})"
    rates = [f"{epoch[rate]:,.0f}" for rate in ("rows", "rows_per_s", "tokens_per_s")]
    waits = [f"{epoch['wait_share']:.2%}", f"{epoch['first_wait_s']:.2f}", f"{epoch['cpu_s']:,.1f}"]
    reads = [f"{epoch['gets']:,.0f}", f"{epoch['bytes_read'] / 1e6:,.1f}"]
    shares = [f"{epoch['mfu']:.1%}", f"{epoch['mfu_six_n']:.1%}"]
    return [name, *rates, *waits, *reads, *shares, f"{epoch['loss']:.5f}", f"{epoch['held_out']['model']:.5f}"]


def _facts(document: Figures) -> dict[str, str]:
    costs = document["costs"]
    facts = {
        "Parameters": f"{costs['parameters']:,}, of which {costs['embedding_parameters']:,} embed genes",
        "Shape": ", ".join(f"{name} {size}" for name, size in document["shape"].items()),
        "Peak": f"{document['peak_flops'] / 1e12:.4g} TFLOP/s of all ranks, {document['peak_is']}",
        "rows/s alone": f"{document['rows_per_s_alone']:,.0f}",
        "Time": f"{document['wall_s']:,.0f} s, {document['cpu_s']:,.0f} processor seconds of all ranks"
        + (f", since step {document['resumed_at_step']:,}" if document["resumed_at_step"] else ""),
        "Peak memory": f"{document['peak_bytes'] / 1e6:,.0f} MB of the first rank",
        "torch": document["torch"],
    }
    if document["ray_cpu_s"]:
        facts["Ray"] = f"{document['ray_cpu_s']:,.0f} processor seconds of its processes"
    if "gpu_peak_bytes" in document:
        peak, reserved = (document[name] / 1e6 for name in ("gpu_peak_bytes", "gpu_reserved_bytes"))
        facts["GPU memory"] = f"{peak:,.0f} MB of tensors, {reserved:,.0f} MB reserved"
    return facts


def bill_flags(document: Figures) -> list[str]:
    """The options of `bill.py` for this run, but for the rates of loading."""
    first, settings = document["epochs"][0], document["settings"]
    sizes = {
        "rows": first["rows"],
        "epochs": settings["epochs"],
        "parameters": document["costs"]["parameters"],
        "tokens-per-row": round(first["tokens"] / first["rows"]),
        "gpus": document["ranks"],
        "gpu-rows-per-s": round(document["rows_per_s_alone"] / document["ranks"], 1),
    }
    return [word for name, size in sizes.items() for word in (f"--{name}", f"{size:.10g}")]


def _commands(document: Figures, flags: Sequence[str]) -> dict[str, str]:
    again = shlex.join(["python", "-m", "benchmarks.training.pretrain", *flags])
    bill = shlex.join(["python", "-m", "benchmarks.training.bill", "--measured", "bench.json", *bill_flags(document)])
    return {
        "Run this again.": again,
        "Forecast the hours of such a run, from the output of 'zloader bench --json' for its store.": bill,
    }
