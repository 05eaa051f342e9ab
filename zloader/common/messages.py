"""Text for people: names and numbers in messages, the name that was probably meant, warnings, and what is logged."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any

_LISTED = 10
_MOST_REASON = 500  # characters
# What precedes the host of a URL; in Azure's it may be the container.
_USER = re.compile(r"(?:(?<!\baz:)(?<!\babfs:)(?<!\babfss:)//[^/\s]*|//[^/\s]*:[^/\s]*)@")
_QUERY = re.compile(r"(https?://[^\s?]+)\?[^\s]*")
_WEB = re.compile(r"\bhttps?://", re.IGNORECASE)
_REQUESTED = re.compile(r"(?s)^.*?Error performing [A-Z]+ .*? in [\d.]+[a-zµ]+(, after .*?)? +- (HTTP error: )?")
_XML = re.compile(r"(?s)<\?xml.*?<Code>(.*?)</Code>\s*<Message>(.*?)[\n<].*")
_CAUSE = re.compile(r'(?:error|message): "([^"]+)"')
_DIGITS = re.compile(r"\d+")
_SUGGESTED = 3
_CUTOFF = 0.7  # of difflib's similarity: `cel_type` and `celltype` for cell_type, but not `donor` for `dose`
_MOST_KNOWN = 200_000  # names looked at, which takes about a second
_MOST_COMPARED = 2000  # spellings; difflib compares about 10 000 per second


def printable(text: str) -> str:
    r"""The text on one line. Characters that a terminal obeys or hides become escapes, as in a repr.

    Names in a store and messages of other libraries may hold such characters. Whatever is printed passes here.

    >>> print(printable("T cells\x1b[2J"))
    T cells\x1b[2J
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """The text with such escapes in the place of all characters but the ends of its lines."""
    return "\n".join(map(printable, text.split("\n")))


def _log_shown(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


logging.getLogger("zloader").addFilter(_log_shown)


def listed(names: Iterable[Any], most: int = _LISTED) -> str:
    """Names for a message: the first `most`, then the number of further ones."""
    names = [printable(str(name)) for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"


def without_users(text: str) -> str:
    """A text without the users and passwords in its URLs."""
    return _USER.sub("//", text)


def without_secrets(url: str) -> str:
    """A URL without user and password, and without its query, which may be a signature. In a key ? may be a pattern.

    It may be chained, such as zip://...::https://...
    """
    return re.split(r"[?#]" if _WEB.search(url) else r"\?(?=.*=)", without_users(url))[0]


def reason_of(error: BaseException) -> str:
    """The message of an error of another library, on one line, without secrets in URLs.

    obstore says at the end why there is no connection, and before it much that is of no use.
    """
    said, _, details = str(error).partition("\n\nDebug source")
    text = _REQUESTED.sub("", said).replace("Server returned non-2xx status code:", "status")
    text = _XML.sub(r"\1: \2", _QUERY.sub(r"\1", without_users(text)))
    causes = dict.fromkeys(_CAUSE.findall(details)) if "status" not in text else ()
    text += f" ({', '.join(causes)})" * bool(causes)
    return " ".join(text.split())[:_MOST_REASON] or type(error).__name__


def cause(error: Exception) -> Exception:
    """The error, as the cause of another, which tracebacks show; or its text alone, without secrets in URLs."""
    text = _QUERY.sub(r"\1", without_users(str(error)))
    return error if text == str(error) else RuntimeError(f"{type(error).__name__}: {text}")


def suggestion(name: Any, known: Iterable[str]) -> str:
    """`". Did you mean 'x'?"` with the names in `known` that are nearest to `name`; an empty string if none is near."""
    found = nearest(name, known) if isinstance(name, str) else []
    return f". Did you mean {' or '.join(map(repr, found))}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The up to three names nearest to `name`, best first.

    Names that differ in case only come first, then those that share a part, such as `layers/counts` for `counts`,
    `raw/X` for `raw` and `ENSG00000111640` for `ENSG00000111640.15`. If there are none, those of similar spelling.
    """
    wanted = _plain(name)
    spellings: dict[str, list[str]] = {}
    for each in dict.fromkeys(islice(known, _MOST_KNOWN)):
        plain = _plain(each)
        parts = plain.replace("/", "_").replace(".", "_").split("_")
        for spelling in dict.fromkeys((plain, *parts)):
            spellings.setdefault(spelling, []).append(each)
    last = wanted.rstrip("/").rpartition("/")[2]
    alike = [spelling for spelling in (wanted, last, last.partition(".")[0]) if spelling and spelling in spellings]
    found = dict.fromkeys(each for spelling in alike or _similar(wanted, spellings) for each in spellings[spelling])
    return list(found)[:_SUGGESTED]


def _similar(wanted: str, spellings: Iterable[str]) -> list[str]:
    """Spellings similar to a name. If there are many, only those that begin alike are compared.

    `human3` is another name than `human4`, not one that was mistyped.
    """
    compared = [spelling for spelling in spellings if _DIGITS.sub("0", spelling) != _DIGITS.sub("0", wanted)]
    if len(compared) > _MOST_COMPARED:
        compared = [spelling for spelling in compared if spelling[:3] == wanted[:3]]
    return get_close_matches(wanted, compared, cutoff=_CUTOFF) if len(compared) <= _MOST_COMPARED else []


def _plain(name: str) -> str:
    return name.strip().casefold()


def size(n_bytes: float) -> str:
    """Formats a number of bytes.

    >>> size(7_599_670)
    '7.6 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.0f} {unit}" if unit == "B" or n_bytes >= 99.95 else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"


def warn_user(message: str) -> None:
    """Warns at the line outside zloader that led here, however many wrappers and constructors lie between."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("zloader", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), UserWarning, stacklevel=level)
