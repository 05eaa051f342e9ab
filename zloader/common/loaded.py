"""What torch and JAX say of this process and of arrays, without importing them: what is not loaded has made nothing."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def worker_info() -> Any:
    """The DataLoader worker that this process is, with its `id` and `num_workers`; None outside of workers."""
    return getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)()


def rank_and_world_size(framework: str) -> tuple[int, int] | None:
    """The rank that `jax.distributed` or torch.distributed gives this process; None if neither is initialised."""
    jax: Any = sys.modules.get("jax")
    if framework == "jax" and jax is not None and jax.distributed.is_initialized():
        return jax.process_index(), jax.process_count()
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None


def is_tensor(found: Any) -> bool:
    """Whether it is a torch.Tensor."""
    return isinstance(found, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_sparse(found: Any) -> bool:
    """Whether it is a torch.sparse_csr tensor."""
    return is_tensor(found) and str(found.layout) == "torch.sparse_csr"


def is_array(found: Any) -> bool:
    """Whether it is an array of NumPy or JAX, or a tensor."""
    return is_tensor(found) or isinstance(found, np.ndarray) or _is_of_jax(found)


def _is_of_jax(found: Any) -> bool:
    return isinstance(found, getattr(sys.modules.get("jax"), "Array", ()))
