"""Minibatches of jax.Arrays: those of NumPy, put on devices of JAX by the consumer's thread.

JAX does not copy an array of the host that begins at a multiple of 64 bytes, as large ones that were gathered do.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.loaded import is_array
from zloader.reading.gather import aligned
from zloader.training.csr_rows import CsrRows
from zloader.training.frameworks import NumPy
from zloader.training.minibatch import ByName, Minibatch
from zloader.training.tokens import Tokens

_LEAST_VALUES = 1024  # of CSR rows, with their padding
_STEPS = 8  # lengths of padded CSR rows between powers of two: at most an eighth is padding
_ON_HOST = ("obs_names", "group")  # strings, which JAX does not have
_X64 = "jax.config.update('jax_enable_x64', True)"


@dataclass(frozen=True)
class Jax(NumPy):
    """jax.Arrays on the default device, on a jax.Device, or divided by a jax.sharding.Sharding."""

    name: str = "jax"

    def dense(self, values: NDArray[Any]) -> Any:
        return values.view(jax.numpy.bfloat16) if values.dtype == np.uint16 else values

    def usable_device(self, device: Any, layout: str) -> Any:
        if layout in ("scipy", "anndata"):
            raise OptionError(f"layout={layout!r} has no arrays of JAX: take layout 'dense', 'packed' or 'csr'")
        if device is not None and not isinstance(device, jax.Device | Sharding):
            raise OptionError(
                "with framework='jax', device must be a jax.Device such as jax.devices()[0], or a "
                f"jax.sharding.Sharding, not {device!r:.100}"
            )
        if layout in ("csr", "packed") and isinstance(device, Sharding) and device.num_devices > 1:
            raise OptionError(f"layout={layout!r} cannot be divided over {device.num_devices} devices: take 'dense'")
        return device

    def require_dtype(self, dtype: str | None) -> None:
        if dtype in ("float64", "int64") and not jax.config.jax_enable_x64:
            raise OptionError(f"JAX has no {dtype} unless it is told to: run {_X64} first, or take another dtype")

    def require_even(self, device: Any, batch_size: int, *, full: bool) -> None:
        if not isinstance(device, Sharding):
            return
        n_rows = batch_size * (1 if device.is_fully_addressable else jax.process_count())
        sharding = _of_dims(device, 1)
        try:
            parts = sharding.addressable_devices_indices_map((n_rows,)).values()
            divided = sharding.shard_shape((n_rows,)) != (n_rows,)
        except ValueError as error:
            raise OptionError(f"batch_size={batch_size} cannot be divided over the devices: {error}") from error
        rows = {part[0].indices(n_rows) for part in parts if part is not None}
        if sum(last - first for first, last, _ in rows) != batch_size:
            raise OptionError(
                f"device={device!r:.200} does not give each of {jax.process_count()} processes other rows: divide the "
                "first axis among all processes"
            )
        if divided and not full:
            raise OptionError(
                "the last minibatch of an epoch may have fewer rows, which cannot be divided over the devices: give "
                "drop_last=True, or remainder='pad'"
            )

    def prepare(self) -> None:
        _register()

    def finished(self, minibatch: Minibatch, device: Any) -> Minibatch:
        for name, column in [*minibatch.obs.items(), *minibatch.obsm.items()]:
            _require_fit(column, f"{name!r} of obs or obsm")
        return minibatch.each(functools.partial(_put, device))


def _put(device: Any, array: Any) -> Any:
    if isinstance(array, CsrRows):
        return _rounded(array).each(functools.partial(_put, device))
    if not is_array(array):  # a batch_transform may return anything
        return array
    _require_fit(array, "a minibatch")
    if not isinstance(device, Sharding):
        return jax.device_put(array, device)
    try:
        return jax.make_array_from_process_local_data(_of_dims(device, array.ndim), array)
    except ValueError as error:
        raise OptionError(f"an array of shape {array.shape} cannot be divided over the devices: {error}") from error


def _of_dims(sharding: Sharding, n_dims: int) -> Sharding:
    """The sharding for an array that has fewer axes than x."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > n_dims:
        return sharding.update(spec=PartitionSpec(*sharding.spec[:n_dims]))
    return sharding


def _require_fit(array: Any, where: str) -> None:
    """Raises OptionError for whole numbers that JAX would cut down to 32 bits."""
    if jax.config.jax_enable_x64 or array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or not array.size:
        return
    limits = np.iinfo("int32" if array.dtype.kind == "i" else "uint32")
    least, most = array.min(), array.max()
    if least < limits.min or most > limits.max:
        found = least if least < limits.min else most
        raise OptionError(f"{where} has {found}, and JAX has whole numbers of 32 bits only: run {_X64} first")


def _rounded(rows: CsrRows) -> CsrRows:
    """The rows with zeros behind their values, up to a length that few minibatches do not share."""
    n_values = max(_LEAST_VALUES, len(rows.values))
    step = max(1, (1 << (n_values - 1).bit_length()) // (2 * _STEPS))
    length = -(-n_values // step) * step

    def longer(values: NDArray[Any]) -> NDArray[Any]:
        out = aligned(np.empty, (length,), values.dtype)
        out[: len(values)], out[len(values) :] = values, 0
        return out

    return CsrRows(rows.indptr, longer(rows.indices), longer(rows.values), rows.shape)


@functools.cache
def _register() -> None:
    """Makes minibatches and their parts pytrees, so that jitted functions take them."""
    register: Any = jax.tree_util.register_pytree_node
    register(
        ByName,
        lambda each: (tuple(each.values()), tuple(each)),
        lambda names, values: ByName(zip(names, values, strict=True)),
    )
    arrays = ["indptr", "indices", "values"]
    jax.tree_util.register_dataclass(CsrRows, data_fields=arrays, meta_fields=["shape"])
    jax.tree_util.register_dataclass(Tokens, data_fields=[each.name for each in fields(Tokens)], meta_fields=[])
    of_minibatch = [each.name for each in fields(Minibatch) if each.name not in _ON_HOST]

    def parts(minibatch: Minibatch) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(minibatch, name) for name in of_minibatch), None

    register(Minibatch, parts, lambda _, values: Minibatch(**dict(zip(of_minibatch, values, strict=True))))
