# SPDX-License-Identifier: Apache-2.0
"""Scenes: a job that trains on four hosts while a fault happens, and the conditions that must hold after any fault.

One job serves many scenes, as starting one takes longer than most of them. After each, all members must have the same
state after every round, and every round's sum must be that of the gradients that counted, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nicps.session.channel import Channel
from tests import mixed_rounds
from tests.netns.endless import ENDLESS, HOOKS
from tests.netns.labs import until
from tests.netns.members import DEFAULTS, Run, tiny_job
from tests.netns.stage import Stage

#: What hosts have saved of a round, by member number.
_Saved = dict[int, dict[str, Any]]
_SUM = re.compile(r"[0-9].*\.sum\.npz")


@dataclass
class Drill:
    """A job on a stage, and its faults. `more` is behind the text of job.py, `hooks` behind that of hooks.py. `also`:
    whose numbers sums may be beside those of the exchange that was asked for (`mixed_rounds`).

    Attributes: `made`, the gradients that `exact` has found counted, by the exchange whose numbers they were.
    """

    stage: Stage
    more: str = ""
    hooks: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    also: Sequence[str] = ()
    channel: Channel | None = None
    job_id: str = ""
    forgiven: int = 0  # up to this round states may have differed
    made: Counter[str] = field(default_factory=Counter)
    _cache: dict[Path, dict[str, Any]] = field(default_factory=dict, repr=False)
    _stamps: dict[Path, tuple[int, int]] = field(default_factory=dict, repr=False)
    _checked: mixed_rounds.Checked = field(default_factory=mixed_rounds.Checked, repr=False)

    def __enter__(self) -> Drill:
        """With its stage."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stage).up()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.stage.close()

    # ---- the job

    def submit(self, host: str = "h1") -> None:
        """Begin a job; it is not under way yet."""
        stage = self.stage
        self.close()
        stage.ready()
        stage.clear()
        self._cache.clear()
        self._checked = mixed_rounds.Checked()
        self.forgiven = 0
        place = stage.folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        place.chmod(0o777)
        self.place = place
        more, hooks = (text.format(place=str(place)) for text in (ENDLESS, HOOKS))
        job = tiny_job(stage.folder, more + self.more, hooks=hooks + self.hooks)
        self.channel = stage.submit(host, job, **self.settings)

    def begin(self, host: str = "h1") -> None:
        """Begin a job, and wait until all train."""
        self.submit(host)
        self.all_train(timeout_s=180.0)
        self.job_id = str(self.status(host)["job"])
        self.await_switch()

    def ready(self) -> None:
        """Make sure that all train, whatever was before."""
        if self.stage.box is not None:
            self.stage.box.serve()
        if self.channel is not None and self.under_way():
            self.goes_on(*self.stage.names)
            self.await_switch()
            return
        self.begin()

    def await_switch(self) -> None:
        """With `--exchange switch`: wait until that switch makes the sums."""
        if self.stage.box is not None and "exchange" not in self.settings:
            self.await_exchange("linux-switch")

    @property
    def asked(self) -> str:
        """The exchange that the job names."""
        return str(self.settings.get("exchange", DEFAULTS["exchange"]))

    def exchange(self, host: str = "h1") -> str:
        """Of the last round there."""
        path = self.stage.records(host) / f"{self.last(host)}.sum.npz"
        return str(self._load(path)["exchange"]) if path.exists() else ""

    def await_exchange(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait until that exchange makes the sums at all hosts."""
        exchanges = lambda: {self.exchange(host) for host in self.stage.names}  # noqa: E731
        self.until(lambda: exchanges() == {name}, f"sums of the exchange {name}", timeout_s)

    def under_way(self) -> bool:
        """Whether all hosts are in one and the same job's training."""
        found = [self.stage.status(host) for host in self.stage.names]
        return all(
            s is not None
            and s["job"] == self.job_id
            and s["phase"] == "train"
            and all(m["state"] != "left" for m in s["members"])
            for s in found
        )

    def status(self, host: str) -> dict[str, Any]:
        """The status of the agent there."""
        status = self.stage.status(host)
        assert status is not None, self.stage.log(host)
        return status

    def lead(self) -> str:
        """The host that acts as node 1, as a member reports it."""
        for host in self.stage.names:
            status = self.stage.status(host)
            if status is not None and status["state"] == "member":
                return str(status["members"][status["lead"] - 1]["name"])
        raise AssertionError("nobody is a member")

    def number(self, host: str) -> int:
        """The host's number in the list."""
        for other in self.stage.names:
            status = self.stage.status(other)
            for member in status["members"] if status is not None else ():
                if member["name"] == host:
                    return int(member["number"])
        raise AssertionError(f"nobody knows {host}")

    def host(self, number: int) -> str:
        """The host with that number."""
        return next(host for host in self.stage.names if self.number(host) == number)

    def others(self, gone: str) -> list[str]:
        """All hosts but this one."""
        return [host for host in self.stage.names if host != gone]

    def views(self) -> set[int]:
        """The numbers of the views in force at all hosts."""
        return {int(self.status(host)["view"]) for host in self.stage.names}

    def damage(self, host: str, what: str) -> set[int]:
        """Change the training program's weights, buffers or optimizer there without its knowledge.

        It is found, and the host takes the state again; returns the rounds after which it differed.
        """
        said = {name: len(self.stage.log(name)) for name in self.stage.names}
        (self.place / f"{what}.{host}").touch()
        self.until(self.damaged_rounds, "a round after which the host differs")
        words = f"the weights of {host} differ from the others'"
        self.until(
            lambda: any(words in self.stage.log(name)[at:] for name, at in said.items()),
            "it is found",
        )
        self.all_train(90.0)
        astray = self.damaged_rounds()
        self.exact(host)
        self.forgive()
        return astray

    @contextlib.contextmanager
    def half_sent(self, host: str) -> Iterator[int]:
        """Return in the middle of a round: the others' gradients are in, half of this host's is on its way."""
        folder = self.stage.records(host)

        def round_of(kind: str) -> int:
            return max((int(path.stem) for path in folder.glob(f"*.{kind}")), default=0)

        def others_are_in() -> bool:
            status = self.status(host)
            states = {m["name"]: m["state"] for m in status["members"]}
            others = {name for name, state in states.items() if state == "sent"}
            return status["round"] == round_of("waits") and others == states.keys() - {host}

        before = round_of("waits")
        try:
            (folder / "hold").touch()
            self.until(lambda: round_of("waits") > before, f"{host} is about to offer")
            self.until(others_are_in, "the others have offered")
            (folder / "half").touch()
            round_ = round_of("waits")
            self.until(lambda: round_of("half") == round_, "half of it is on its way")
            yield round_
        finally:
            for name in ("hold", "half"):
                (folder / name).unlink(missing_ok=True)

    # ---- the conditions

    def committed(self, round_: int) -> set[str]:
        """The members whose gradients are in that round's sum, as all holders of it record; `exact` checks the sum
        itself.
        """
        saved = [self.stage.records(host) / f"{round_}.sum.npz" for host in self.stage.names]
        found = [self._load(path)["counted"][:, 0].tolist() for path in saved if path.exists()]
        assert found and all(counted == found[0] for counted in found), (round_, found)
        return {self.host(number) for number in found[0]}

    def last(self, host: str) -> int:
        """The last round that the training program there has applied; 0 if none."""
        names = os.listdir(self.stage.records(host))  # many a second, of hundreds of files
        return max((int(name.split(".")[0]) for name in names if _SUM.fullmatch(name)), default=0)

    def counted(self, host: str, round_: int = 0) -> set[int]:
        """The members counted in that round, or in the last."""
        path = self.stage.records(host) / f"{round_ or self.last(host)}.sum.npz"
        return set(self._load(path)["counted"][:, 0].tolist()) if path.exists() else set()

    def goes_on(self, *hosts: str, rounds: int = 3, timeout_s: float = 60.0) -> None:
        """Wait until these have trained so many rounds more in which exactly they were counted."""
        begun = {host: self.last(host) for host in hosts}
        numbers = {self.number(host) for host in hosts}

        def moved() -> bool:
            return all(
                sum(
                    self.counted(host, round_) == numbers
                    for round_ in range(begun[host] + 1, self.last(host) + 1)
                )
                >= rounds
                for host in hosts
            )

        self.until(moved, f"{hosts} train on without others", timeout_s)

    def all_train(self, timeout_s: float = 60.0) -> None:
        """Wait until every host's gradient is counted."""
        self.until(lambda: self.stage.status("h1") is not None, "h1 answers", timeout_s)
        stage = self.stage

        def all_there() -> bool:
            found = [stage.status(host) for host in stage.names]
            return all(
                s is not None and s["phase"] == "train" and len(s["members"]) == len(stage.names)
                for s in found
            )

        self.until(all_there, "all are in training", timeout_s)
        self.goes_on(*stage.names, timeout_s=timeout_s)

    def stands_by(
        self, *hosts: str, saying: str = "", job: bool = True, timeout_s: float = 60.0
    ) -> None:
        """Wait until these stand by, with their part of the job or (`job` False) without it, and report the reason."""

        def waits(host: str) -> bool:
            status = self.stage.status(host)
            return (
                status is not None
                and (status["job"] is not None) is job
                and (status["state"] == "standby" or bool(status["trouble"]))
                and saying in status["trouble"]
            )

        self.until(lambda: all(map(waits, hosts)), f"{hosts} stand by, {saying!r}", timeout_s)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """`until`; if it fails, with all output of the agents."""
        try:
            return until(condition, what, timeout_s)
        except AssertionError as error:
            logs = {host: self.stage.log(host)[-3000:] for host in self.stage.names}
            said = "\n".join(f"== {host}\n{text}" for host, text in logs.items())
            states = {host: self.stage.status(host) for host in self.stage.names}
            short = {
                host: s
                and {k: s[k] for k in ("state", "phase", "view", "lead", "round", "trouble", "job")}
                for host, s in states.items()
            }
            if self.stage.box is not None:
                said += f"\n== switch\n{self.stage.box.said()[-3000:]}"
            raise AssertionError(f"{error}\n{short}\n{said}") from None

    def exact(self, *astray: str) -> int:
        """Same state on all members after every round, and sums equal to the reference; the rounds.

        Args:
            astray: hosts whose own state was damaged; their gradients were counted all the same.
        """
        last = max(map(self.last, self.stage.names))  # the training goes on meanwhile
        rounds: dict[int, tuple[_Saved, _Saved]] = {}  # offers and sums, by member number
        for host in self.stage.names:
            for path in self.stage.records(host).glob("[0-9]*.npz"):
                round_, what, _ = path.name.split(".")
                if int(round_) <= last:
                    saved = self._load(path)
                    both = rounds.setdefault(int(round_), ({}, {}))
                    both[what == "sum"][int(saved["number"])] = saved
        strays = {self.number(host) for host in astray}
        for round_, (_, sums) in rounds.items():
            digests = {str(own["digest"]) for k, own in sums.items() if k not in strays}
            assert not sums or round_ <= self.forgiven or len(digests) == 1, (round_, digests)
        width = int(str(self.settings.get("lane", "i16"))[1:])
        self.made = mixed_rounds.check(width, rounds, self.stage.boots(), self._checked)
        if self.asked != "auto":
            numbers = "broadcast" if self.asked == "broadcast" else "stripes"
            assert {*self.made} <= {numbers, *self.also}, self.made
        return sum(
            len(next(iter(sums.values()))["counted"]) > 0 for _, sums in rounds.values() if sums
        )

    def damaged_rounds(self) -> set[int]:
        """Rounds after which not all had the same state."""
        digests: dict[int, set[str]] = {}
        for host in self.stage.names:
            for path in self.stage.records(host).glob("[0-9]*.sum.npz"):
                digests.setdefault(int(path.name.split(".")[0]), set()).add(
                    str(self._load(path)["digest"])
                )
        return {r for r, of in digests.items() if len(of) > 1 and r > self.forgiven}

    def forgive(self) -> None:
        """Check no more states after the rounds until now."""
        self.forgiven = max(map(self.last, self.stage.names))

    def disown(self, host: str) -> int:
        """Forget the rounds that this host trained apart from the others in its life before this; return their
        number.
        """
        folder = self.stage.records(host)
        together = self.stage.hosts
        sums = {int(p.name.split(".")[0]): self._load(p) for p in folder.glob("[0-9]*.sum.npz")}
        now = str(sums[max(sums)]["life"])
        common = max(
            r for r, s in sums.items() if len(s["counted"]) == together and s["life"] != now
        )
        gone = [r for r, s in sums.items() if r > common and s["life"] != now]
        for path in folder.glob("[0-9]*.npz"):
            if int(path.name.split(".")[0]) > common and str(self._load(path)["life"]) != now:
                path.unlink()
                self._cache.pop(path, None)
        return len(gone)

    def end(
        self,
        *hosts: str,
        timeout_s: float = 60.0,
        astray: Sequence[str] = (),
        apart: Sequence[str] = (),
        forgotten: bool = False,
    ) -> Run:
        """Let the job end; these (default: all) must have taken part to the end.

        Args:
            astray: hosts whose memory was damaged.
            forgotten: the agents that found the damage may have been killed since; the result knows nothing then
                (docs/open.md).
            apart: hosts that have trained apart from the others for a while, as their records show.
        """
        stage = self.stage
        members = set(hosts or stage.names)
        lead = self.lead()
        (self.place / "end").touch()
        result = self.until(lambda: self._result(lead), "the job's end", timeout_s)
        run = Run(result, [], {name: stage.path(name, "runs") for name in stage.names})
        assert set(run.members) == members and run.members[0] == lead
        assert result["weights_identical"] is (not apart) or (forgotten and astray)
        hashes: dict[int, set[str]] = {}
        for host in run.members:
            for row in run.metrics(host) if host not in apart else ():
                if host in astray and row["round"] <= self.forgiven:
                    continue
                hashes.setdefault(row["round"], set()).add(row["weights_sha256"])
        assert all(len(of) == 1 for of in hashes.values())
        self.exact()
        stage.all_stand_by(*members)
        return run

    def _result(self, lead: str) -> dict[str, Any] | None:
        status = self.stage.status(lead)
        last = status["last_job"] if status is not None else {}
        if last.get("job_id") != self.job_id:
            return None
        assert last["error"] is None, last
        return dict(last["result"])

    def close(self) -> None:
        """Leave the job to itself."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _load(self, path: Path) -> dict[str, Any]:
        found = self._cache.get(path)
        if found is not None and not path.name.endswith(".offer.npz"):
            return found
        what = path.stat()
        stamp = what.st_ino, what.st_mtime_ns
        if found is None or stamp != self._stamps.get(path):  # it was offered again
            self._stamps[path] = stamp
            with np.load(path) as file:
                found = self._cache[path] = dict(file)
        return found
