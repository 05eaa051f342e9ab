"""Small synthetic runs in the format of benchmarks/compare/run.py."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
RUN: Record = {
    "record": "run", "format": 1, "began": "2026-11-23T06:00:00Z", "commit": "0123456789abcdef", "dirty": False,
    "command": ["python", "-m", "benchmarks.compare.run", "--quick"], "preset": "quick", "cores": 2,
    "processor": "Example 1",
    "memory_bytes": 8_000_000_000, "disk": "nvme", "kernel": "Linux 6", "python": "3.11.9", "load": [0.1, 0.2, 0.3],
    "rows": 1000, "data": [{"name": "synthetic", "rows": 1000, "genes": 50, "values": 20_000}], "prices": {"get": 4e-7},
}  # fmt: skip
SPEEDS = {
    "zloader": 200_000.0, "zloader, dense": 150_000.0, "annbatch": 60_000.0, "AnnData in memory": 400_000.0,
}  # fmt: skip
LIMITS = {"memcpy": 5_000_000.0, "decoding": 250_000.0, "disk": 300_000.0, "link": 120_000.0}
CASES: list[tuple[str, Record, float]] = [  # scenario, case and how much slower it is than SPEEDS
    ("cold_warm_local", {"epoch": "cold"}, 2.5),
    ("cold_warm_local", {"epoch": "warm"}, 1.0),
    ("cold_warm_cloud", {"epoch": "cold"}, 5.0),
    ("cold_warm_cloud", {"epoch": "warm"}, 1.1),
    *(("order", {"block_rows": block, "fetch_factor": factor}, 64 / block) for block in (16, 64) for factor in (4, 64)),
    *(("minibatch", {"batch_size": size}, 64 / size) for size in (64, 1024)),
    ("random", {}, 3.0),
    *(("panel", {"genes": 20, "batch_size": size}, 32 / size) for size in (64, 1024)),
    *(("tokens", {"tokenizer": name}, 8.0) for name in ("Geneformer", "scGPT")),
    ("sets", {}, 4.0),
    ("first", {}, 0.01),
    *(("memory", {"epoch": epoch}, 1.0) for epoch in range(3)),
    *(("scaling", {"rows": 10**power}, 0.1) for power in (4, 6, 8)),
    *(("processes", {"processes": n}, 1 / n**0.8) for n in (1, 2, 4)),
    ("conversion", {}, 6.0),
]  # fmt: skip


def measurement(scenario: str, peer: str, turn: int, rows_per_s: float, **more: Any) -> Record:
    """A measurement of 1 000 rows. `more` replaces or adds keys."""
    seconds = 1000 / rows_per_s
    record = {
        "record": "measurement", "scenario": scenario, "peer": peer, "case": {}, "turn": turn, "data": "synthetic",
        "rows": 1000, "seconds": seconds, "user_s": seconds, "system_s": seconds / 4, "peak_bytes": 300_000_000,
        "first_s": seconds / 2, "gets": None, "bytes": None, "wait_share": 0.5, "entropy": None, "dollars": None,
        "load": 1.0,
    }  # fmt: skip
    return {**record, **more}


def peers(*names: str) -> list[Record]:
    return [
        {"record": "peer", "peer": name, "version": "1.2.3", "python": "3.12.1", "packages": {"zarr": "3.1"},
         "how": f"{name} as its documentation says.", "format": "Zarr"} for name in names
    ]  # fmt: skip


def whole_run(turns: int = 3, *, noise: float = 0.05, seed: int = 0, **speeds: float) -> list[Record]:
    """A run with every scenario, limits, a missing peer and a failure. `speeds` are factors of SPEEDS by peer."""
    rng = random.Random(seed)
    records = [RUN, *peers(*SPEEDS)]
    records += [{"record": "limit", "name": name, "bytes_per_s": 1e9, "rows_per_s": x} for name, x in LIMITS.items()]
    records.append({"record": "missing", "peer": "protoplast", "reason": "no wheel for Python 3.12"})
    records.append({"record": "failed", "scenario": "tokens", "peer": "annbatch", "case": {"tokenizer": "scGPT"},
                    "turn": 1, "error": "ValueError: no <tokenizer> | of that name"})  # fmt: skip
    for scenario, case, slower in CASES:
        for turn in range(1, turns + 1):
            load = rng.lognormvariate(0, 3 * noise)  # the same for all peers of a turn
            for peer, speed in SPEEDS.items():
                rate = speed * speeds.get(peer, 1.0) / slower / load * rng.lognormvariate(0, noise)
                more: Record = {"case": case}
                if scenario == "scaling":
                    more["data"] = f"rows_{case['rows']}"
                if scenario in ("order", "random"):
                    more["entropy"] = 2.0 + 0.5 * (scenario == "random") + case.get("fetch_factor", 0) / 200
                records.append(measurement(scenario, peer, turn, rate, **more))
    return [*records, {"record": "end", "seconds": 1500.0, "failures": ["annbatch", "protoplast"]}]


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
