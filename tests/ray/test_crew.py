"""A producer that cannot start, or whose end cannot be watched."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from benchmarks.harness.virtual_time import run_in_virtual_time
from zloader.common.errors import ProducerError

pytest.importorskip("zloader.ray", exc_type=ImportError, reason='Ray is not installed: pip install "zloader[ray]"')
crew_module = pytest.importorskip("zloader.ray.crew")
exceptions = pytest.importorskip("ray.exceptions")

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("error", "raises", "kept"),
    [
        pytest.param(exceptions.ActorUnschedulableError("no room"), ProducerError, False, id="no such machine"),
        pytest.param(exceptions.RuntimeEnvSetupError("no such package"), ProducerError, False, id="no environment"),
        pytest.param(TypeError("no such class"), TypeError, False, id="any other"),
        pytest.param(None, ProducerError, True, id="not started yet"),
    ],
)
def test_a_producer_that_cannot_start_is_not_kept(monkeypatch, error, raises, kept):
    monkeypatch.setattr(crew_module, "_session", lambda: "this")
    monkeypatch.setattr(crew_module.ray, "kill", lambda actor: None)

    async def opened():
        if error is None:
            await asyncio.Event().wait()
        raise error

    class OneMember(crew_module.Crew):
        def __post_init__(self):
            self._members.add(member)

        def _taken(self):
            return member

        def _why_none_starts(self):
            return "no producer has started"

    member = crew_module.Member(actor=None, opened=opened(), session="this")
    crew = OneMember(loader=None, size=1, resources={}, start_s=300.0)
    with pytest.raises(raises, match="no "):
        run_in_virtual_time(crew.join(lambda: False))
    assert (member.lost, crew._free, crew._members) == ((False, [member], {member}) if kept else (True, [], set()))


@pytest.mark.parametrize("reachable", [True, False])
def test_an_error_in_watching_is_raised_while_ray_is_there(monkeypatch, reachable):
    async def answer():
        monkeypatch.setattr(crew_module, "_session", lambda: "this" if reachable else "")
        raise OSError("no answer")

    monkeypatch.setattr(crew_module, "_session", lambda: "this")
    actor = SimpleNamespace(answer=SimpleNamespace(remote=answer))
    ended = crew_module.Member(actor=actor, opened=None, session="this").ended()
    with pytest.raises(OSError, match="no answer") if reachable else contextlib.nullcontext():
        run_in_virtual_time(ended)
