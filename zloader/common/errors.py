"""Every error that zloader raises, in one tree.

Each message states what happened, the value concerned, and what to do about it::

    ZloaderError
    ├── OptionError (ValueError)              an invalid option or argument
    │   └── KeywordError (TypeError)          a keyword that the function or class does not have
    ├── MissingColumnError (KeyError)         a missing column; the message lists the columns that exist
    ├── ForkError (RuntimeError)              object storage used on both sides of a fork()
    ├── ConcurrentUseError (RuntimeError)     two threads asked one iterator for a minibatch at once
    ├── ProducerError (RuntimeError)          no producer of a Ray cluster can be started, or one after another is lost
    ├── SourceError (ValueError)              a source file that cannot be converted
    ├── CacheError (ValueError)               not a cache directory, or no mirror to open offline
    └── StoreError
        ├── StoreNotFoundError (FileNotFoundError)
        ├── StoreExistsError (FileExistsError)
        ├── AccessDeniedError (PermissionError)
        ├── FormatError (ValueError)          not AnnData, or stored in an unsupported form
        ├── StoreChangedError                 the store changed after it was opened
        └── ReadError (OSError)               a read that failed after all retries; names URL, key and byte range
            ├── MissingObjectError
            ├── TruncatedObjectError
            ├── CorruptChunkError
            └── DeadlineError (TimeoutError)
"""

from __future__ import annotations

from zloader.common.messages import printable


class ZloaderError(Exception):
    """Base class of every error that zloader raises.

    >>> try:
    ...     zl.BlockShuffling(block_size=0)
    ... except zl.ZloaderError as error:
    ...     print(error)
    block_size must be a whole number of at least 1, not 0
    """

    def __str__(self) -> str:
        """The message: a line for each argument."""
        return "\n".join(printable(str(line)) for line in self.args)


class OptionError(ZloaderError, ValueError):
    """An option or argument is invalid."""


class KeywordError(OptionError, TypeError):
    """The function or class has no such keyword; the message names the nearest."""


class MissingColumnError(ZloaderError, KeyError):
    """The dataset has no such obs column or obsm array, or a store no such var column."""


class ForkError(ZloaderError, RuntimeError):
    """The parent process had used object storage before it forked this process."""


class ConcurrentUseError(ZloaderError, RuntimeError):
    """An iterator was asked for a minibatch while another thread was waiting for one from it."""


class ProducerError(ZloaderError, RuntimeError):
    """No producer of a Ray cluster can be started, or one after another is lost with the same fetch."""


class SourceError(ZloaderError, ValueError):
    """The source file cannot be converted."""


class CacheError(ZloaderError, ValueError):
    """The directory is not a cache, or it holds no mirror of the store."""


class StoreError(ZloaderError):
    """Base class of errors that concern a store."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """Nothing is stored at the URL."""


class StoreExistsError(StoreError, FileExistsError):
    """Something is already stored at the URL."""


class AccessDeniedError(StoreError, PermissionError):
    """The credentials do not permit the operation."""


class FormatError(StoreError, ValueError):
    """The store is not AnnData, or is stored in an unsupported form."""


class StoreChangedError(StoreError):
    """The objects of the store changed after it was opened."""


class ReadError(StoreError, OSError):
    """A read failed after all retries. The message names the URL, the key and the byte range."""


class MissingObjectError(ReadError):
    """A required object is missing."""


class TruncatedObjectError(ReadError):
    """A read returned fewer bytes than requested."""


class CorruptChunkError(ReadError):
    """Stored bytes do not match their checksum, or cannot be decoded."""


class DeadlineError(ReadError, TimeoutError):
    """A read did not finish within its deadline."""
