"""Whether the Ray cluster is still there: its head, and the raylet of this machine.

Ray tells nobody. If the raylet of this machine dies, Ray ends the process about a second later. If the head (the GCS)
dies, Ray ends it after `RAY_gcs_rpc_server_reconnect_timeout_s`, 60 seconds by default, unless another head has taken
over. Neither is an exception. So a stream connects to both now and then, and raises an error before that.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field

import ray

from zloader.common.errors import ProducerError

_CONNECT_S = 5.0
_HEAD_EVERY_S = 5.0
_PATIENCE, _OF_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s", 0.75
_ADVICE = "Start Ray again, and resume from the state_dict of this stream"
Address = tuple[str, int]


@dataclass
class Cluster:
    """The addresses of a cluster. Only those that have answered once are judged."""

    head: Address
    raylet: Address
    patience_s: float
    _answered: set[Address] = field(default_factory=set)
    _head_asked_s: float = -_HEAD_EVERY_S
    _head_silent_s: float | None = None  # since when

    async def require(self) -> None:
        """Raises ProducerError if the raylet refuses connections, or the head has not answered for `patience_s`."""
        if await self._is_silent(self.raylet):
            raise ProducerError(
                f"the raylet of this machine, Ray's process at {_shown(self.raylet)}, is gone. Ray will end this "
                f"process, too. {_ADVICE}"
            )
        now_s = time.monotonic()
        if now_s - self._head_asked_s < min(_HEAD_EVERY_S, self.patience_s / 4):
            return
        self._head_asked_s = now_s
        if not await self._is_silent(self.head):
            self._head_silent_s = None
        elif self._head_silent_s is None:
            self._head_silent_s = now_s
        elif now_s - self._head_silent_s >= self.patience_s:
            raise ProducerError(
                f"the head of the Ray cluster at {_shown(self.head)} has not answered for "
                f"{now_s - self._head_silent_s:.0f} s. Ray will end this process, too, unless ray.shutdown() is called "
                f"first. {_ADVICE}"
            )

    async def _is_silent(self, address: Address) -> bool:
        """Whether nothing listens at an address where something did before. A process that is slow still listens."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(*address)
        except TimeoutError:
            return address == self.head and address in self._answered
        except OSError:
            return address in self._answered
        writer.close()
        self._answered.add(address)
        return False


def cluster_of_ray() -> Cluster:
    """The cluster to which Ray has connected this process."""
    context = ray.get_runtime_context()
    head, _, port = context.gcs_address.rpartition(":")
    node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    patience_s = float(os.environ.get(_PATIENCE, "60"))
    return Cluster(
        head=(head.strip("[]"), int(port)),
        raylet=(node["NodeManagerAddress"], int(node["NodeManagerPort"])),
        patience_s=_OF_RAYS_PATIENCE * patience_s,
    )


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
