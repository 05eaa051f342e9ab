"""A loopback S3 endpoint with a cloud's latency, bandwidth and faults. Linux only.

    python -m benchmarks.harness.s3 --root DIR --port 9000 --ttfb-ms 30 --ttfb-sigma 0.3 --conn-mbps 80 --total-mbps 400
    python -m benchmarks.harness.s3 --upstream 127.0.0.1:8333 --faults '[{"kind": "status", "count": 2}]'

`--root` serves DIR/BUCKET/KEY read-only and ignores signatures; with `--mapped`, the files must not change.
`--upstream` forwards requests to a real S3 server. The first line of output is the URL. SIGTERM, Ctrl-C or the
end of the process that started it end the simulator. It can be controlled over HTTP:

    POST /__sim/config {"faults": [...], "ttfb_ms": 30, ...}     changes settings
    POST /__sim/reset                                            resets counters and log
    GET  /__sim/config, /__sim/stats, /__sim/log

The statistics have the CPU seconds of the process, user_s and system_s, which go on after a reset. HttpFault describes
the faults and their fields. The kinds are status, reset, truncate, noclen, stall, flip, slow, delay, ignore_range,
short and etag. server.py describes the link.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from dataclasses import fields

from benchmarks.harness.measuring import die_with_parent
from benchmarks.harness.s3 import Shaping, Sim

_NICENESS = -15  # as far as the user may: the server stands for another machine, which does not wait for this one


def main() -> None:
    """Runs a simulator until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root")
    parser.add_argument("--upstream")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--mapped", action="store_true", help="send files from memory; they must not change")
    parser.add_argument("--certificate", help="a PEM with certificate and key: serves https")
    parser.add_argument("--faults", type=json.loads, default=[], help="a JSON list")
    for field in fields(Shaping):
        parser.add_argument("--" + field.name.replace("_", "-"), type=float, default=field.default)
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before threads start, because they inherit the mask
    die_with_parent()
    with contextlib.suppress(PermissionError):
        os.nice(_NICENESS)
    with Sim(**vars(parser.parse_args())) as sim:
        print(sim.url, flush=True)
        signal.sigwait(ending)


if __name__ == "__main__":
    main()
