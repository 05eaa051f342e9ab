"""Every peer and zloader in one run: the same rows, in turns, in processes of their own. Writes JSONL.

    python -m benchmarks.compare.run --quick                       # about 25 minutes, after the environments are made
    python -m benchmarks.compare.run --full                        # about an hour, and 15 GB of disk
    python -m benchmarks.compare.run --quick --tiny                # two minutes, without environments
    python -m benchmarks.compare.run --quick --peers zloader,annbatch --scenario cold_warm_local --data FILE.h5ad
    python -m benchmarks.compare.run --full --resume FILE.jsonl    # goes on where a run was stopped

The script makes seeded synthetic counts (synthetic.py), the human pancreas that comes with zloader (or takes the file
of `--data`) and a synthetic drug screen (screens.py). It makes an environment for each peer with that peer's own newest
dependencies (rivals.py), starts a simulated cloud (cloud.py), and runs the scenarios of scenarios.py. `--list-peers`
prints the peers, one a line; the modules of peers/ say how each is tuned. A peer that cannot be installed is recorded
with the reason, and one that fails or hangs is recorded and left out of the rest of the case.

Every peer gives out all rows and values in an epoch that is checked and not measured; one that does not is recorded as
failed. Epochs of slow peers end early, and count the rows that they have given out until then. (The checked epochs of
the slowest peers end early too. Those over the pancreas, for the main side of each peer, are usually complete.)

A run that was stopped goes on with `--resume` and its other options. Cases whose turns have
all been made are not measured again. A case that was under way is measured anew, because turns are compared with one
another. Commit, preset, peers and their versions, data, prices, link and machine must be the same.

Each line of the output is a JSON object, written at once, whose `record` says which kind it is:

- "run" (first line): commit, command, machine, data, prices.
- "peer": a side of a tool, with its version, how it is tuned, its format, and the packages of its environment.
- "missing": a peer that could not be installed, and the reason.
- "limit": memcpy, decoding, disk and link of this machine, in bytes/s, and in rows/s of the synthetic data.
- "measurement": scenario, peer, case, turn, data, rows, seconds (wall), user_s and system_s (of its processes),
  peak_bytes (resident), first_s (to the first minibatch), gets and bytes (of the cloud's server), wait_share (of a
  consumer that takes 3 ms per minibatch, after the first fetch), entropy (mean over minibatches, of the first obs
  column, in bits), dollars (of GETs and egress), load (of the machine), checked (what the checked epoch compared).
- "failed": the same place, and the error.
- "done": all turns of this scenario, data and case have been made. `seconds` includes conversions and checks.
- "resumed": the run was stopped, and goes on here: when, the load of the machine, and how many records were dropped.
- "end" (last line): seconds since the run began or was resumed, and the sides that failed or are missing. A file
  without it is of a run that was stopped.

Sizes are in bytes and times in seconds. The exit status is 1 if zloader failed, or any peer of a tiny run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare import inputs, limits, peers, resuming, rivals
from benchmarks.compare.presets import FULL, QUICK, TINY
from benchmarks.compare.scenarios import SCENARIOS
from benchmarks.compare.session import Prices, Session
from benchmarks.harness.cloud import LinkSpeed
from benchmarks.harness.measuring import Figures

FORMAT = 1
PRESETS = {"tiny": TINY, "quick": QUICK, "full": FULL}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="about 25 minutes")
    size.add_argument("--full", action="store_true", help="about an hour")
    parser.add_argument("--tiny", action="store_true", help="with --quick: two minutes, peers that need no environment")
    parser.add_argument("--peers", default=",".join(peers.MODULES), help="comma-separated (default: all)")
    parser.add_argument("--scenario", default=",".join(SCENARIOS), help="comma-separated (default: all)")
    parser.add_argument("--list-peers", action="store_true", help="print the names of the peers")
    parser.add_argument("--data", type=Path, metavar="FILE.h5ad", help="real data (default: the human pancreas)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--output", type=Path, metavar="FILE.jsonl", help="default: a new file in the current folder")
    output.add_argument("--resume", type=Path, metavar="FILE.jsonl", help="the output of a run that was stopped")
    parser.add_argument("--work", type=Path, help="directory for data and stores (default: a temporary directory)")
    parser.add_argument("--total-mbps", type=float, default=400, help="MB/s of the cloud's link (default: 400)")
    parser.add_argument(
        "--tls", action="store_true", help="the cloud is https, with a certificate authority of its own"
    )
    Prices.add_options(parser)
    rivals.add_options(parser)
    options = parser.parse_args(arguments)
    for name, known in (("peers", peers.MODULES), ("scenario", SCENARIOS)):
        chosen = getattr(options, name).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name}: unknown: {', '.join(sorted(unknown))} (known: {', '.join(known)})")
        setattr(options, name, chosen)
    if not (options.list_peers or options.quick or options.full):
        parser.error("give --quick or --full")
    if options.tiny and not options.quick:
        parser.error("--tiny goes with --quick")
    if options.data and not options.data.is_file():
        parser.error(f"--data: there is no file {options.data}")
    if options.output and options.output.is_file() and options.output.stat().st_size:
        parser.error(f"--output: {options.output} exists; to go on with its run, give --resume {options.output}")
    options.preset = "tiny" if options.tiny else "quick" if options.quick else "full"
    if options.tiny:
        options.peers = [name for name in options.peers if peers.peer(name).light]
    return options


def about(options: argparse.Namespace, session: Session, *, module: str = "compare.run") -> Figures:
    """The first record: what is run, by which module, where, and on which data."""
    data = [
        {"name": each.name, "rows": each.rows, "genes": each.genes, "values": each.values}
        for each in session.data.values()
    ]
    return {
        "format": FORMAT,
        "began": now(),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": ["python", "-m", f"benchmarks.{module}", *sys.argv[1:]],
        "preset": options.preset,
        "sizes": dict(vars(session.preset)),
        "tools": options.peers,
        "changes": _hash((_git("diff", "HEAD") or "").encode()),
        "cores": len(os.sched_getaffinity(0)),
        "machine": _machine(),
        "processor": _processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk": _disk(session.work),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "rows": session.preset.rows,
        "data": data,
        "link": vars(session.speed) if session.speed else None,
        "prices": vars(session.prices),
    }


def now() -> str:
    """Date and time."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _git(*arguments: str) -> str | None:
    """The output of git about this repository, None outside of one."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _machine() -> str | None:
    """A hash that tells this machine from others, without its name."""
    with contextlib.suppress(OSError):
        return _hash(Path("/etc/machine-id").read_bytes())
    return None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _disk(path: Path) -> str | None:
    """The kind of the file system that holds a path, and where it is mounted from."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if fields.split()[2] == wanted:
            return " ".join(kind.split()[:2])
    return None


def prepare(session: Session, options: argparse.Namespace) -> None:
    """Makes the data."""
    preset, work = session.preset, session.work
    session.say("making the data")
    made = [
        inputs.synthetic(work / "synthetic" / "data.h5ad", rows=preset.rows, genes=preset.genes),
        inputs.own(options.data) if options.data else inputs.pancreas(work / "pancreas" / "data.h5ad"),
        inputs.screen(work / "screen" / "data.h5ad", **preset.screen),
    ]
    session.data = {each.name: each for each in made}


def begin(session: Session, options: argparse.Namespace) -> None:
    """Records the run, or that it goes on, and its peers."""
    first, earlier = about(options, session), session.earlier
    if earlier.path is None:
        session.output.write_text("")
        session.record("run", **first)
    else:
        earlier.expect_run(first)
    sides = session.add(options.peers, options)
    for side in sides:
        if side["peer"] in earlier.sides:
            earlier.expect_side(side["peer"], side)
    if earlier.path is not None:
        resuming.write(earlier)
        session.failures |= earlier.failures
        kept = len(earlier.records)
        session.say(f"resuming {earlier.path}: {kept} records are kept, {earlier.n_dropped} are dropped")
        session.record("resumed", began=now(), load=os.getloadavg(), kept=kept, dropped=earlier.n_dropped)
    for side in sides:
        if side["peer"] not in earlier.sides:
            session.record(side["record"], **{name: value for name, value in side.items() if name != "record"})


def measure(session: Session, options: argparse.Namespace) -> None:
    """Measures the limits, and runs the scenarios."""
    synthetic = session.data["synthetic"]
    zloader = next((each for each in session.contenders if each.tool == "zloader"), None)
    for _ in session.left("limits", synthetic.name, [{}] if zloader else []):
        session.say("measuring the limits")
        store = session.store(zloader, synthetic)
        for each in session.contenders:  # zloader compiles its loops once per installation, when they first run
            if each.tool == "zloader":
                with session.reader(each, synthetic, {}) as one:
                    one.epoch()
        for limit in limits.limits(store, session.speed, work=session.work, link_bytes=session.preset.link_bytes):
            session.record(limit.pop("record"), **limit)
    for name in options.scenario:
        began = time.monotonic()
        SCENARIOS[name](session)
        session.say(f"{name} took {time.monotonic() - began:.0f} s")


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmarks, and prints the name of the output."""
    options, began = parsed(arguments), time.monotonic()
    if options.list_peers:
        print("\n".join(peers.MODULES))
        return
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    earlier = resuming.read(options.resume) if options.resume else resuming.Earlier()
    output = options.resume or options.output or Path(time.strftime("run-%Y%m%d-%H%M%S.jsonl"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # the processes of the run end with it
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        session = Session(
            preset=PRESETS[options.preset],
            prices=Prices.given(options),
            speed=LinkSpeed(total_mbps=options.total_mbps, tls=options.tls),
            work=Path(directory).absolute(),
            output=output,
            earlier=earlier,
        )
        prepare(session, options)
        begin(session, options)
        measure(session, options)
        session.record("end", seconds=time.monotonic() - began, failures=sorted(session.failures))
    print(output)
    if broken := sorted(name for name in session.failures if options.tiny or name.startswith("zloader")):
        sys.exit(f"failed or missing: {'; '.join(broken)}")


if __name__ == "__main__":
    main()
