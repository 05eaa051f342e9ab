"""A loopback S3 endpoint with a cloud's latency, bandwidth and faults. Linux, standard library only.

    python -m benchmarks.harness.s3 --root DIR --port 9000 --ttfb-ms 30 --ttfb-sigma 0.3 --conn-mbps 80 --total-mbps 400
    python -m benchmarks.harness.s3 --upstream 127.0.0.1:8333 --faults '[{"kind": "status", "count": 2}]'

`--root` serves DIR/BUCKET/KEY read-only and ignores signatures. Without limits it reaches 2-4 GB/s at 0.2-0.35 s of CPU
per GB, because bodies are sent with sendfile. With limits a GB takes three times that and more. `--upstream` forwards
requests to a real S3 server. The first line of output gives the URL. SIGTERM or Ctrl-C ends the simulator. It can be
controlled over HTTP:

    POST /__sim/config {"faults": [...], "ttfb_ms": 30, ...}     changes settings
    POST /__sim/reset                                            resets counters and log
    GET  /__sim/config, /__sim/stats, /__sim/log

HttpFault describes the faults and their fields. The kinds are status, reset, truncate, noclen, stall, flip, slow,
delay, ignore_range, short and etag.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import fields

from benchmarks.harness.s3.faults import HttpFault
from benchmarks.harness.s3.server import Sim
from benchmarks.harness.s3.wire import Shaping

__all__ = ["HttpFault", "Shaping", "Sim"]


def main() -> None:
    """Runs a simulator until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root")
    parser.add_argument("--upstream")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=json.loads, default=[], help="a JSON list")
    for field in fields(Shaping):
        kind = type(field.default)
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default)
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before threads start, because they inherit the mask
    with Sim(**vars(parser.parse_args())) as sim:
        print(f"s3sim {sim.url} pid {os.getpid()}", flush=True)
        signal.sigwait(ending)


if __name__ == "__main__":
    main()
