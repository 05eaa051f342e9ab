"""Whether a store can be reached: the credentials for its URL, how long it takes to open, and its speed.

Reading goes on in a thread that is left behind after a deadline, because some clients try for minutes to connect.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from zloader.access.location import location_of
from zloader.common.concurrent_calls import fulfil
from zloader.common.errors import ZloaderError
from zloader.common.messages import reason_of, size
from zloader.common.options import FetchOptions
from zloader.insight.findings import Finding

_OPEN_S, _READ_S = 60.0, 20.0
_MEASURED_S = 2.0
_SLOW_BYTES_PER_S = 50e6
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")

Result = TypeVar("Result")


def about_store(url: str, storage_options: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings for the store at a URL, which is opened and read for two seconds. Its rows are not checked."""
    try:
        location = location_of(url, storage_options)
    except ZloaderError as error:
        yield _broken("URL", "not usable", str(error))
        return
    yield Finding(part="store", name="URL", value=location.url)
    try:
        found = _within(_OPEN_S, lambda: location.kind.credentials(location))
        yield Finding(part="store", name="credentials", value=found)
    except Exception as error:  # noqa: BLE001 - clients raise errors of their own
        yield _broken("credentials", "none", str(error) or type(error).__name__)
        return
    proxies = [name for name in os.environ if name.lower() in _PROXIES and os.environ[name]]
    if proxies and location.scheme != "file":
        yield Finding(part="store", name="proxies", value=", ".join(sorted(proxies)))
    yield from _about_reading(url, storage_options, is_local=location.scheme == "file")


def _about_reading(url: str, storage_options: Mapping[str, Any], *, is_local: bool) -> Iterator[Finding]:
    from zloader.dataset.open_dataset import open_dataset
    from zloader.insight.link import disk_bytes_per_s, link_bytes_per_s

    measure = disk_bytes_per_s if is_local else functools.partial(link_bytes_per_s, options=FetchOptions())
    began_s = time.perf_counter()
    try:
        dataset = _within(_OPEN_S, lambda: open_dataset(url, storage_options=storage_options))
        opened_s = time.perf_counter() - began_s
        content = f"{dataset.n_obs:,} rows x {dataset.n_vars:,} genes, opened in {opened_s:.1f} s"
        yield Finding(part="store", name="content", value=content)
        names = dataset.matrices.names
        speed = _within(_READ_S, lambda: measure(dataset, x=names[0], enough_s=_MEASURED_S)) if names else None
    except Exception as error:  # noqa: BLE001 - whatever a client raises, the store cannot be read
        yield _broken("reading", "failed", str(error) or type(error).__name__)
        return
    yield _about_speed(speed, is_local=is_local)


def _about_speed(speed: float | None, *, is_local: bool) -> Finding:
    if speed is None:
        why = f"not measured: too little to read{', or it stays in memory' * is_local}"
        return Finding(part="store", name="speed", value=why, state="good" if is_local else "unknown")
    slow = speed < _SLOW_BYTES_PER_S and not is_local
    return Finding(
        part="store",
        name="speed",
        value=f"{size(speed)}/s",
        state="advice" if slow else "good",
        advice="the first epoch reads at this speed: train in the region of the bucket, and keep a cache" * slow,
    )


def _within(seconds: float, function: Callable[[], Result]) -> Result:
    """The result of a function. Raises TimeoutError if it takes longer, and leaves its thread behind."""
    future: Future[Result] = Future()
    threading.Thread(target=fulfil, args=(future, function), daemon=True, name="zloader-doctor").start()
    if not wait([future], timeout=seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s: check the endpoint, the network, proxies and firewalls")
    return future.result()


def _broken(name: str, value: str, advice: str) -> Finding:
    return Finding(part="store", name=name, value=value, state="broken", advice=reason_of(ZloaderError(advice)))
