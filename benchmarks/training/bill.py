"""The hours and dollars of a training run, and what bounds its speed, before it is started.

    python -m benchmarks.training.bill [--measured bench.json] [--parameters 51e6 --tokens-per-row 1024 --gpus 8 ...]

Everything is arithmetic. A GPU trains as many rows a second as its FLOPs allow, 6 per parameter and token at a share of
its peak, or as many as were measured. The process of each GPU loads its rows, and each machine mirrors a part of them
(`dataset.split(n)`): the first epoch reads from the store, later ones from the mirrors. The slowest of GPUs, loading
and links sets the pace. The defaults are Tahoe-100M, a model like scGPT, eight H100, and rates that were measured with
zloader. `--measured` takes rows, rates and bytes from the output of `zloader bench --json` instead. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HOURS_PER_MONTH = 730


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run. Rates of loading are per process, one for each GPU; the link is per machine; prices are dollars.

    Prices are for reading S3 within its region, a local disk and a rented H100. `gpu_rows_per_s` is None if the FLOPs
    decide.
    """

    rows: float = 100.6e6
    epochs: int = 3
    parameters: float = 51e6
    tokens_per_row: float = 1024
    gpus: int = 8
    machines: int = 1
    mfu: float = 0.35
    peak_tflops: float = 989
    gpu_rows_per_s: float | None = None
    cold_rows_per_s: float = 120e3
    warm_rows_per_s: float = 400e3
    link_megabytes_per_s: float = 1200
    bytes_per_row: float = 2600
    gets_per_row: float = 0.0052
    mirror_bytes_per_row: float = 7400
    gpu_hour: float = 3.0
    thousand_gets: float = 0.0004
    gigabyte_egress: float = 0.0
    nvme_gigabyte_month: float = 0.08

    def epoch(self, *, cold: bool) -> dict[str, Any]:
        """Rows per second, what sets them, hours, and dollars by item, of the first epoch or of a later one."""
        of_flops = self.mfu * self.peak_tflops * 1e12 / (6 * self.parameters * self.tokens_per_row)
        gpus = self.gpus * (self.gpu_rows_per_s or of_flops)
        rates = {"gpu": gpus, "loading": self.gpus * (self.cold_rows_per_s if cold else self.warm_rows_per_s)}
        rates |= {"link": self.machines * self.link_megabytes_per_s * 1e6 / self.bytes_per_row} if cold else {}
        bound_by = min(rates, key=lambda part: rates[part])
        hours = self.rows / rates[bound_by] / 3600
        read = self.rows if cold else 0
        dollars = {
            "GPUs": self.gpus * self.gpu_hour * hours,
            "GETs": read * self.gets_per_row / 1000 * self.thousand_gets,
            "egress": read * self.bytes_per_row / 1e9 * self.gigabyte_egress,
            "NVMe": self.rows * self.mirror_bytes_per_row / 1e9 * self.nvme_gigabyte_month * hours / _HOURS_PER_MONTH,
        }
        waiting = 1 - rates[bound_by] / gpus
        return {"rows_per_s": rates[bound_by], "bound_by": bound_by, "gpu_wait_share": waiting, "hours": hours,
                "dollars": dollars}  # fmt: skip

    def bill(self) -> dict[str, Any]:
        """The first epoch, a later one, and hours and dollars of the whole run."""
        cold, warm = self.epoch(cold=True), self.epoch(cold=False)
        epochs = [cold, *[warm] * (self.epochs - 1)]
        hours, dollars = (sum(each["hours"] for each in epochs), sum(sum(each["dollars"].values()) for each in epochs))
        return {"run": dataclasses.asdict(self), "cold": cold, "warm": warm, "hours": hours, "dollars": dollars}


def from_bench(document: Mapping[str, Any]) -> dict[str, float]:
    """Rows, and the medians of rates and bytes of cold and warm epochs."""
    if document["step_ms"]:
        raise SystemExit("these rates are those of simulated steps: measure again without --step-ms")
    rows = float(document["rows"])
    of_kinds = document["medians"]
    rates = [kind for kind in ("cold", "warm") if kind in of_kinds]
    if not rates:
        raise SystemExit("no cold or warm epoch was complete")
    known = {"rows": rows} | {f"{kind}_rows_per_s": of_kinds[kind]["rows_per_s"] for kind in rates}
    if "cold" in of_kinds:
        known |= {
            f"{name}_per_row": of_kinds["cold"][of] / rows for name, of in (("bytes", "bytes_read"), ("gets", "gets"))
        }
    if document["link_bytes_per_s"] is not None:
        known["link_megabytes_per_s"] = document["link_bytes_per_s"] / 1e6
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="the output of 'zloader bench --json'")
    for field in dataclasses.fields(Run):
        kind = int if field.type == "int" else float
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"default: {field.default}")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    measured = given.pop("measured", None)
    known = {} if measured is None else from_bench(json.loads(measured.read_text(encoding="utf-8")))
    made = Run(**(known | given)).bill()
    print(f"first epoch: {made['cold']['hours']:.3g} hours, set by {made['cold']['bound_by']}; each later one: "
          f"{made['warm']['hours']:.3g} hours, set by {made['warm']['bound_by']}")  # fmt: skip
    print(f"whole run: {made['hours']:,.4g} hours, ${made['dollars']:,.2f}")
    print(json.dumps(made))


if __name__ == "__main__":
    main()
