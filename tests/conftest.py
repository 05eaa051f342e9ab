"""Servers and settings shared by all tests."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib.metadata
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anndata._io.specs.methods
import botocore.loaders
import hypothesis
import pytest
from forked import Interpreter
from helpers import NEVER_S, PATIENCE_S

from benchmarks.harness.s3 import Sim
from zloader.common.compiled import load_compiler
from zloader.testing import SeaweedFS

# The machine may be slow or shared, so examples have no deadline. CI runs the same examples every time.
hypothesis.settings.register_profile(
    "local", deadline=None, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("local"), derandomize=True, database=None)
# Four devices of the processor, for the page on JAX. JAX reads this when it is first used.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure() -> None:
    """Loads numba, so that tests use compiled loops, whichever ran before them; NumPy's are for test_few_rows.py.

    One pytest-xdist worker at a time compiles a loop. The others then find it in its cache. Otherwise, in a fresh
    clone, all workers compile the same loops at the same time.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        from numba.core.dispatcher import Dispatcher

        Dispatcher.compile = _in_turn(Dispatcher.compile)
    load_compiler()


def _in_turn(compile_loop: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`Dispatcher.compile`, by one process at a time for each function.

    It compiles the functions that a function calls. No function calls itself through others, so processes never wait
    for each other in a circle.
    """
    flock = fcntl.flock  # tests replace the function in the module
    in_process = threading.RLock()  # numba has such a lock itself, which must not be held before this one
    held: set[str] = set()
    locks = Path(__file__).parent / "__pycache__"
    locks.mkdir(exist_ok=True)

    def compile_in_turn(dispatcher: Any, signature: Any) -> Any:
        function = dispatcher.py_func
        name = f"{function.__module__}.{function.__qualname__}"
        with in_process:
            if name in held:
                return compile_loop(dispatcher, signature)
            with (locks / f"{name}.lock").open("w") as file:
                flock(file, fcntl.LOCK_EX)
                held.add(name)
                try:
                    return compile_loop(dispatcher, signature)
                finally:
                    held.remove(name)

    return compile_in_turn


_LONG_FILES = {
    *("test_pretrain.py", "test_stream.py", "test_docs.py", "test_notebooks.py", "test_scvi.py"),
    "test_wheel.py",
}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases of tables as slow, as `every` says. The newest versions run every n-th case only.

    Files that take minutes come first. With --dist loadfile and --no-loadscope-reorder, none is left for the end.
    """
    items.sort(key=lambda item: item.path.name not in _LONG_FILES)
    seen: Counter[str] = Counter()
    for item in items:
        for marker in item.iter_markers("every"):
            table = item.nodeid.partition("[")[0]
            if seen[table] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.any_version)
            seen[table] += 1


@pytest.hookimpl(tryfirst=True)  # before its fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips slow tests from the time on that `.ci/run` sets, so that it reaches its end on a busy machine."""
    end_s = float(os.environ.get("SLOW_TESTS_END", "inf"))
    if item.get_closest_marker("slow") and time.time() > end_s:
        pytest.skip("CI has no time left for slow tests")


@dataclass(frozen=True, kw_only=True)
class S3:
    """A fresh prefix in the bucket of a real S3 server, and the options to open it."""

    bucket: str
    prefix: str
    endpoint_url: str
    storage_options: dict[str, Any] = field(repr=False)
    read_only_storage_options: dict[str, Any] = field(repr=False)

    def url(self, name: str = "") -> str:
        return f"s3://{self.bucket}/{self.prefix}/{name}"


@pytest.fixture(scope="session", autouse=True)
def _freeze_imports() -> None:
    """Exempts imported objects from garbage collection, because some tests call the collector.

    In its first test, hypothesis looks for references to NumPy's generator. It would not see those of exempted objects.
    """
    hypothesis.given(hypothesis.strategies.none())(lambda _: None)()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _cache_botocore_files() -> Iterator[None]:
    """Caches botocore's JSON files. Otherwise every new client parses megabytes of them."""
    with pytest.MonkeyPatch.context() as patch:
        load = functools.cache(botocore.loaders.JSONFileLoader().load_file)
        patch.setattr(botocore.loaders.JSONFileLoader, "load_file", lambda _, path: load(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def _cache_versions() -> Iterator[None]:
    """Caches the version of zarr. Otherwise anndata parses zarr's package metadata for every array that it writes."""
    with pytest.MonkeyPatch.context() as patch:
        version = functools.cache(importlib.metadata.version)
        patch.setattr(anndata._io.specs.methods, "version", version, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _ignore_cloud_settings() -> Iterator[None]:
    """Hides the developer's credentials, profiles, endpoints and proxies from the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="session", autouse=True)
def _disable_curl_timeout() -> Iterator[None]:
    """Raises curl's low-speed limit of 20 s, so that a read from a stalled server ends by zloader's deadline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(int(NEVER_S)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _handle_sigint() -> Iterator[None]:
    """Restores SIGINT, which a shell ignores for background processes and their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A real S3 server, started once per session."""
    with SeaweedFS(tmp_path_factory.mktemp("seaweed"), start_deadline_s=PATIENCE_S) as server:
        yield server


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """An interpreter that starts processes in milliseconds."""
    with Interpreter() as running:
        yield running


@pytest.fixture
def s3(seaweed: SeaweedFS) -> S3:
    """A fresh prefix on the real S3 server for each test."""
    return S3(
        bucket=seaweed.bucket,
        prefix=uuid.uuid4().hex,
        endpoint_url=seaweed.endpoint_url,
        storage_options=seaweed.storage_options,
        read_only_storage_options=seaweed.read_only_storage_options,
    )


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Callable[..., Sim]]:
    """Starts S3 simulators: `sim(root=DIR, ttfb_ms=5)`, `sim(upstream=s3.endpoint_url)`, or `sim()` for tmp_path."""
    with contextlib.ExitStack() as running:

        def start(**options: Any) -> Sim:
            if not options.keys() & {"root", "upstream"}:
                options["root"] = tmp_path
            return running.enter_context(Sim(**options))

        yield start
