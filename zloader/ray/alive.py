"""Whether the Ray cluster is still there: its head, and the raylet of this machine.

Ray tells nobody. If the raylet of this machine dies, Ray ends the process about a second later. If the head (the GCS)
dies, Ray ends it after `RAY_gcs_rpc_server_reconnect_timeout_s`, 60 seconds by default, unless another head has taken
over. Neither is an exception. So a stream connects to both now and then, and raises an error before that.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from zloader.common.errors import OptionError, ProducerError

_CONNECT_S = 5.0
_HEAD_EVERY_S = 5.0
_PATIENCE, _OF_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s", 0.75
_REFUSALS, _APART_S = (ConnectionRefusedError, ConnectionResetError), 0.1
# This process has no file descriptors, memory or ports left.
_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EAGAIN)
_ADVICE = "Start Ray again, and resume from the state_dict of this stream"
Address = tuple[str, int]


@dataclass
class Cluster:
    """The addresses of a cluster, without a raylet that is not known. Only those that have answered once are judged."""

    head: Address
    raylet: Address | None
    patience_s: float
    _answered: set[Address] = field(default_factory=set)
    _refused_s: float | None = None  # when the raylet refused first, since its last answer
    _head_asked_s: float = -_HEAD_EVERY_S
    _head_silent_s: float | None = None  # since when

    async def require(self) -> None:
        """Raises ProducerError if the raylet refuses two connections, or the head has been silent for `patience_s`.

        Errors of this process say nothing about either, such as those for want of file descriptors or of ports.
        """
        if self.raylet is not None:
            self._require_raylet(self.raylet, await self._error_of(self.raylet), time.monotonic())
        now_s = time.monotonic()
        if now_s - self._head_asked_s < min(_HEAD_EVERY_S, self.patience_s / 4):
            return
        self._head_asked_s = now_s
        self._require_head(now_s, await self._error_of(self.head))

    def _require_raylet(self, raylet: Address, error: OSError | None, now_s: float) -> None:
        if error is None:
            self._refused_s = None
        elif isinstance(error, _REFUSALS) and raylet in self._answered:  # one that is slow only times out
            if self._refused_s is None:
                self._refused_s = now_s
            elif now_s - self._refused_s >= _APART_S:  # two epochs of a stream may ask in the same instant
                raise ProducerError(
                    f"the raylet of this machine, Ray's process at {_shown(raylet)}, is gone. Ray will end this "
                    f"process, too. {_ADVICE}"
                )

    def _require_head(self, now_s: float, error: OSError | None) -> None:
        if error is None:
            self._head_silent_s = None
        elif self.head in self._answered and not _is_own(error):
            if self._head_silent_s is None:
                self._head_silent_s = now_s
            elif now_s - self._head_silent_s >= self.patience_s:
                raise ProducerError(
                    f"the head of the Ray cluster at {_shown(self.head)} has not answered for "
                    f"{now_s - self._head_silent_s:.0f} s. Ray will end this process, too, unless ray.shutdown() is "
                    f"called first. {_ADVICE}"
                )

    async def _error_of(self, address: Address) -> OSError | None:
        """The error of connecting to an address; None if a process listens there."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(*address)
        except OSError as error:
            return error
        writer.close()
        self._answered.add(address)
        return None


def _is_own(error: OSError) -> bool:
    """Whether an error is for want of something in this process. A name that does not resolve is not."""
    if isinstance(error, socket.gaierror):
        return error.errno in (socket.EAI_SYSTEM, socket.EAI_MEMORY)
    return error.errno in _OWN


def cluster_of_ray() -> Cluster:
    """The cluster to which Ray has connected this process. Raises OptionError if Ray's patience is no number."""
    context = ray.get_runtime_context()
    head, _, port = context.gcs_address.rpartition(":")
    return Cluster(
        head=(head.strip("[]"), int(port)),
        raylet=raylet_of(context.get_node_id(), ray.nodes()),
        patience_s=_OF_RAYS_PATIENCE * patience_of(os.environ),
    )


def raylet_of(node_id: str, nodes: Sequence[Mapping[str, Any]]) -> Address | None:
    """The address of the raylet of a node; None if Ray does not list the node, which may be too new."""
    node = node_of(node_id, nodes)
    return None if node is None else (node["NodeManagerAddress"], int(node["NodeManagerPort"]))


def node_of(node_id: str, nodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The entry of a node among those that Ray lists; None if it is not there."""
    return next((node for node in nodes if node["NodeID"] == node_id), None)


def patience_of(environment: Mapping[str, str]) -> float:
    """The seconds after which Ray ends a process whose head is gone. Raises OptionError if that is not a number."""
    stated = environment.get(_PATIENCE, "60")
    try:
        seconds = float(stated)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # nor nan
        raise OptionError(
            f"the environment variable {_PATIENCE} must be a number of seconds, such as 60, not {stated!r}"
        )
    return seconds


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
