"""Options that all tokenizers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zloader.common.checks import require_count, require_one_of
from zloader.common.errors import OptionError
from zloader.tokenizers.masking import Masked


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOptions:
    """Options of every tokenizer, which describes them."""

    x: str = "X"
    genes_by: str | None = None
    dtype: Literal["int64", "int32"] = "int64"
    pad_to: int | None = None
    masked: Masked | None = None

    def _put(self, **values: Any) -> None:
        """Replaces fields, which only `__post_init__` may do."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check(self, max_length: int, n_special: int) -> None:
        """Raises OptionError for unusable options. Rows have at most `max_length` tokens, `n_special` at least."""
        require_count(max_length=max_length)
        if max_length <= n_special:
            raise OptionError(f"max_length={max_length} leaves no room for a gene beside {n_special} special tokens")
        for name, value in (("x", self.x), ("genes_by", self.genes_by)):
            if not isinstance(value, str) and not (value is None and name == "genes_by"):
                raise OptionError(f"{name} must be a name (a string), not {value!r:.100}")
        require_one_of(("int64", "int32"), dtype=self.dtype)
        if self.pad_to is not None:
            require_count(pad_to=self.pad_to)
            if self.pad_to < max_length:
                raise OptionError(
                    f"pad_to={self.pad_to} is shorter than rows of max_length={max_length} tokens: give a larger "
                    "pad_to, or a smaller max_length"
                )
        if self.masked is not None and not isinstance(self.masked, Masked):
            raise OptionError(f"masked must be a zl.tokenizers.Masked, not {self.masked!r:.100}")
