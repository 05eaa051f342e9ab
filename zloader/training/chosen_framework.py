"""The framework that a Loader names. torch and JAX are imported when they are chosen."""

from __future__ import annotations

from typing import Any

from zloader.common.checks import require_one_of
from zloader.common.errors import OptionError
from zloader.training.frameworks import Framework, NumPy

_NAMES = ("torch", "numpy", "jax")
_INSTALL = {"torch": "pip install torch", "jax": 'pip install "zloader[jax]"'}


def framework_of(framework: Any) -> Framework:
    """The framework of this name. Raises OptionError if it is not installed."""
    require_one_of(_NAMES, framework=framework)
    if framework == "numpy":
        return NumPy()
    try:
        if framework == "jax":
            from zloader.training.jax_arrays import Jax

            return Jax()
        from zloader.training.tensors import Torch

        return Torch()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != framework:
            raise
        raise OptionError(
            f"framework={framework!r} needs {framework}, which is not installed: {_INSTALL[framework]}, or take "
            "framework='numpy'"
        ) from error
