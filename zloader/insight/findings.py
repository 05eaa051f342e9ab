"""What `zloader doctor` finds: single facts, whether they are a fault, and what to do about them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from zloader.common.messages import reason_of

_SECRET_NAME = re.compile("SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING", re.IGNORECASE)
_USER = re.compile(r"//[^/\s@]*:[^/\s@]*@")  # user and password in a URL
_LEAST_SECRET = 6  # characters


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about this installation.

    `state` is "good", "advice" (it works, but could be better), "broken" (something will fail), or "unknown" (the
    system does not tell). `advice` says what to do, and is empty for good facts.
    """

    part: str
    name: str
    value: str
    state: Literal["good", "advice", "broken", "unknown"] = "good"
    advice: str = ""


Check = Callable[[], Iterable[Finding]]


def gathered(part: str, checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """The findings of named checks, one after another, without secrets.

    A check that fails becomes a finding of an unknown state.
    """
    for name, check in checks:
        try:
            for finding in check():
                yield replace(finding, value=without_secrets(finding.value), advice=without_secrets(finding.advice))
        except Exception as error:  # noqa: BLE001 - on a broken machine anything may fail, and the rest is of use
            why = without_secrets(f"not known: {type(error).__name__}: {reason_of(error)}")
            yield Finding(part=part, name=name, value=why, state="unknown")


def without_secrets(text: str) -> str:
    """A text without passwords in URLs, and without the values of environment variables that are named as secrets.

    Messages of other libraries may quote them.
    """
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _USER.sub("//", text)
