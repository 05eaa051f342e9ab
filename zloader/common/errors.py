"""Every error that zloader raises, as one tree.

Each message says what went wrong, with which value, and what to do.

    ZloaderError
    ├── OptionError (ValueError)              an option or argument that makes no sense
    ├── MissingColumnError (KeyError)         an obs column that is not there; the message lists those that are
    ├── ForkError (RuntimeError)              object storage used after fork()
    ├── ConcurrentUseError (RuntimeError)     an iterator used by two threads at once
    ├── SourceError (ValueError)              a file given to convert that cannot be converted
    ├── CacheError (ValueError)               a directory that is no cache, or no mirror to open offline
    └── StoreError
        ├── StoreNotFoundError (FileNotFoundError)
        ├── StoreExistsError (FileExistsError)
        ├── AccessDeniedError (PermissionError)
        ├── FormatError (ValueError)          not AnnData, or a form that cannot be read
        ├── StoreChangedError                 the objects are not those that were opened
        └── ReadError (OSError)               a read that failed for good: URL, key and byte range
            ├── MissingObjectError
            ├── TruncatedObjectError
            ├── CorruptChunkError
            └── DeadlineError (TimeoutError)
"""

from __future__ import annotations


class ZloaderError(Exception):
    """The root of every error raised by zloader."""


class OptionError(ZloaderError, ValueError):
    """An option or argument that makes no sense."""


class MissingColumnError(ZloaderError, KeyError):
    """An obs column that the dataset does not have."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class ForkError(ZloaderError, RuntimeError):
    """Object storage was used by the parent before this process was forked."""


class ConcurrentUseError(ZloaderError, RuntimeError):
    """An iterator was asked for a minibatch while another thread was waiting for one."""


class SourceError(ZloaderError, ValueError):
    """A source file that cannot be converted."""


class CacheError(ZloaderError, ValueError):
    """A directory that is no cache, or a mirror that is not in it."""


class StoreError(ZloaderError):
    """Something about a store."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is nothing at this URL."""


class StoreExistsError(StoreError, FileExistsError):
    """There is already something at this URL."""


class AccessDeniedError(StoreError, PermissionError):
    """The credentials do not allow this."""


class FormatError(StoreError, ValueError):
    """The store is no AnnData, or in a form that cannot be read."""


class StoreChangedError(StoreError):
    """The objects of the store are not those that were opened."""


class ReadError(StoreError, OSError):
    """A read that failed for good; says URL, key and byte range."""


class MissingObjectError(ReadError):
    """An object that must exist is not there."""


class TruncatedObjectError(ReadError):
    """Fewer bytes came back than were asked for."""


class CorruptChunkError(ReadError):
    """Bytes that do not match their checksum or do not decode."""


class DeadlineError(ReadError, TimeoutError):
    """A read that did not finish within its deadline."""
