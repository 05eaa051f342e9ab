"""What TensorStore is told of a location: driver, endpoint, credentials, as JSON. Opens nothing.

The same `storage_options` and `AWS_*` variables mean the same here as they mean to s3fs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zloader.location import Location


def kvstore_spec(location: Location, credentials: Credentials) -> dict[str, Any]:
    """TensorStore's spec of the key-value store at `location`."""
    # curl gives up a connection that stalls this long; read once a process. Our own deadline is the outer bound.
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "20")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    if location.scheme == "file":
        return {"driver": "file", "path": location.path + "/"}
    bucket, _, prefix = location.path.partition("/")
    options = location.s3_options()
    client = dict(options.get("client_kwargs") or {})
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    region = client.get("region_name") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    spec: dict[str, Any] = {
        "driver": "s3",
        "bucket": bucket,
        "path": f"{prefix}/" if prefix else "",
        "aws_credentials": credentials.spec(options),
        # Bytes in flight are bounded by the fetch; the count only has to be out of its way.
        "s3_request_concurrency": {"limit": 256},
        # 0.1 s doubling to 4 s: a permanent failure shows after about 15 s, not after TensorStore's default of 15 min.
        "s3_request_retries": {"max_retries": 8, "initial_delay": "100ms", "max_delay": "4s"},
    }
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    return spec


class Credentials:
    """What TensorStore is told of s3fs's credentials options.

    It takes a key and a secret only from a file or the environment, so explicit ones are handed over in an anonymous
    file in memory, which lives as long as this object.
    """

    _file: int | None = None

    def spec(self, options: Mapping[str, Any]) -> dict[str, str]:
        """TensorStore's `aws_credentials`."""
        client = dict(options.get("client_kwargs") or {})
        key = options.get("key") or client.get("aws_access_key_id")
        if options.get("anon"):
            return {"type": "anonymous"}
        if key:
            return self._in_memory(
                aws_access_key_id=str(key),
                aws_secret_access_key=str(options.get("secret") or client.get("aws_secret_access_key") or ""),
                aws_session_token=str(options.get("token") or client.get("aws_session_token") or ""),
            )
        profile = options.get("profile")
        known = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
        if profile or known.exists():
            config = Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
            files = {"credentials_file": known, "config_file": config}
            there = {name: str(path if path.exists() else os.devnull) for name, path in files.items()}
            return {"type": "profile", "profile": str(profile or "default"), **there}
        return {"type": "default"}

    def _in_memory(self, **secrets: str) -> dict[str, str]:
        lines = [f"{name} = {value}" for name, value in secrets.items() if value]
        self._file = os.memfd_create("zloader-credentials", os.MFD_CLOEXEC)
        os.write(self._file, "\n".join(["[zloader]", *lines, ""]).encode())
        path = f"/proc/self/fd/{self._file}"
        return {"type": "profile", "profile": "zloader", "credentials_file": path, "config_file": os.devnull}

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
