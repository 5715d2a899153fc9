"""Whether a job that has failed is started again, where, and with how many ranks. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpitrain.errors import UsageError
from mpitrain.faults.options import SHRINK
from mpitrain.launch.request import Request
from mpitrain.launch.supervisor import ENDING_SIGNALS, Outcome
from mpitrain.launch.verdict import lost_hosts
from mpitrain.runtime.counted import counted
from mpitrain.runtime.exit_codes import ON_PURPOSE
from mpitrain.runtime.hostfile import same_hosts

RESTART, ABORT = "restart", "abort"
RESTARTS = 3  # where a restart is asked for, and no number
LONGEST_DELAY_SECONDS = 60.0
NONE_SAVED = "no checkpoint of mpitrain has been written so far"


@dataclass(frozen=True)
class Policy:
    """What happens when a job fails."""

    restarts: int = 0  # how often it is started again
    min_ranks: int = 1  # with how many ranks it still is


def policy(on_failure: str | None, restarts: int | None, min_ranks: int | None, ranks: int) -> Policy:
    """What was asked for.

    Args:
        on_failure: `restart`, `abort` or `shrink`; None for what `restarts` implies.
        restarts: how often.
        min_ranks: of which there must be as many.
        ranks: of the job.

    Raises:
        UsageError: the wishes do not fit together.
    """
    if restarts is not None and restarts < 0:
        raise UsageError(f"--restarts is {restarts}: give 0 for none, or how often a job that fails is started again")
    if min_ranks is not None and not 1 <= min_ranks <= ranks:
        raise UsageError(f"--min-np is {min_ranks}: give at least 1, and no more than the job has, {ranks}")
    if on_failure == ABORT and restarts:
        raise UsageError(f"--on-failure abort and --restarts {restarts} exclude each other: leave one of them out")
    if on_failure == RESTART and restarts == 0:
        raise UsageError("--on-failure restart and --restarts 0 exclude each other: leave one of them out")
    number = RESTARTS if on_failure == RESTART and restarts is None else restarts or 0
    if min_ranks is not None and not number and on_failure != SHRINK:
        raise UsageError(
            "--min-np is for jobs that are started again or go on with fewer ranks: add --restarts N or "
            "--on-failure shrink, or leave it out"
        )
    return Policy(number, min_ranks or 1)


@dataclass(frozen=True)
class Failure:
    """How one attempt ended."""

    step: int  # finished steps, of the whole training where ranks count them
    place: str  # ranks and hosts, if known
    reason: str  # the same for two failures of the same cause
    lost: tuple[str, ...] = ()  # hosts to which there is no connection
    is_death: bool = False  # a rank ended by something else than its program
    is_rough: bool = False  # no rank has told of the fault, and steps were made: which was the last one is not known

    @classmethod
    def of(cls, outcome: Outcome, code: int) -> Failure:
        """What ranks, launcher and connections have told."""
        listener, lost = outcome.listener, tuple(lost_hosts(outcome))
        fault = listener.fault
        # Where no rank has told of the fault, the step is that which was heard of last, half a second ago or less.
        before = max([0, *listener.numbers("resumed")[-1:]])
        heard = max([before, *listener.numbers("saved"), *listener.numbers("step")])
        step = heard if fault is None else fault.step
        if lost:
            word = "was lost" if all(map(outcome.reached, lost)) else "could not be made"
            return cls(step, "", f"the connection to {', '.join(sorted(lost))} {word}", lost, is_rough=heard > before)
        if fault is not None:
            return cls(step, fault.place, fault.reason, (), fault.kind == "death")
        if outcome.timed_out:
            return cls(step, "", "the ranks did not meet")
        place = "" if outcome.first is None else f"rank {outcome.first.rank}, which was gone first"
        reason = f"the launcher ended with exit code {code}"
        return cls(step, place, reason, (), outcome.first is not None, is_rough=heard > before)

    def is_like(self, other: Failure) -> bool:
        """Whether it is the same step, as far as that is known, and the same reason.

        Where a rank was killed the rank belongs to it: the same samples would kill the same rank. Where the step is not
        known, two look different rather than alike, and the number of restarts is the limit.
        """
        if self.is_rough or other.is_rough:
            return False
        if self.is_death and other.is_death and self.place != other.place:
            return False
        return (self.step, self.reason) == (other.step, other.reason)

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step else "before the end of its first step"
        return f"{when} ({self.place}{': ' * bool(self.place)}{self.reason})"


@dataclass(frozen=True)
class NextAttempt:
    """The next attempt."""

    request: Request  # what is started
    delay_seconds: float  # after which
    resumes: bool  # checkpoints have been written, from which it goes on whatever it was told about them


@dataclass
class Restarts:
    """Decides after each attempt of one job."""

    policy: Policy  # what was asked for
    failures: list[Failure] = field(default_factory=list)  # so far
    saved: int | None = None  # step of the newest checkpoint that was written
    _in_vain: int = 0  # attempts in a row that have written no checkpoint

    def after(self, outcome: Outcome, code: int, request: Request) -> tuple[NextAttempt | None, str]:
        """The next attempt, if there is one, and a sentence about it; none where there is nothing to say."""
        saved = outcome.listener.numbers("saved")
        self.saved = saved[-1] if saved else self.saved
        if not self.policy.restarts:
            return None, ""
        why_not = _final(outcome, code)
        if why_not is not None:
            return None, why_not
        failure, earlier = Failure.of(outcome, code), list(self.failures)
        self.failures.append(failure)
        self._in_vain = 0 if saved else self._in_vain + 1
        smaller = remove_hosts(request, failure.lost)
        refusal = self._refusal(failure, earlier, smaller)
        if refusal:
            return None, f"the job failed {failure}, and is not started again: {refusal}{self._newest()}"
        delay = min(LONGEST_DELAY_SECONDS, 2.0 ** max(0, self._in_vain - 1))
        return NextAttempt(smaller, delay, self.saved is not None), (
            f"the job failed {failure}; restart {len(self.failures)} of {self.policy.restarts} in {delay:g} s, "
            f"with {counted(smaller.ranks, 'rank')}{_places(request, smaller)}, {self._origin()}"
        )

    def _refusal(self, failure: Failure, earlier: Sequence[Failure], smaller: Request) -> str:
        if any(failure.is_like(other) for other in earlier):
            step = f"step {failure.step + 1} has" if failure.step else "its first step has"
            return f"{step} failed twice for the same reason"
        if smaller.ranks < self.policy.min_ranks:
            left = counted(smaller.ranks, "rank") if smaller.ranks else "no rank"
            return f"{left} of {self.policy.min_ranks} (--min-np) would be left"
        if len(self.failures) > self.policy.restarts:
            return f"it has been {counted(self.policy.restarts, 'time')} (--restarts)"
        return ""

    def _newest(self) -> str:
        return "" if self.saved is None else f". The newest checkpoint is of step {self.saved}"

    def _origin(self) -> str:
        return NONE_SAVED if self.saved is None else f"from the checkpoint of step {self.saved}"


def _final(outcome: Outcome, code: int) -> str | None:
    """What there is to say where no restart would help; None where one may."""
    fault = outcome.listener.fault
    if code == 0:
        return ""
    if any(signum in ENDING_SIGNALS for signum in outcome.signals):
        return "not started again: it was stopped by a signal"
    if outcome.finished:
        stopped = code in ON_PURPOSE
        reason = "it was stopped by a signal" if stopped else f"it came to its end by itself, with exit code {code}"
        return f"not started again: {reason}"
    if (code if fault is None else fault.exit_code) == UsageError.exit_code:
        return "not started again: what it was given is at fault (exit code 2)"
    if fault.kind in ("signal", "interrupted") if fault is not None else code in ON_PURPOSE:
        return "not started again: it was stopped by a signal"
    return None


def remove_hosts(request: Request, lost: Sequence[str]) -> Request:
    """The same job without some hosts: with fewer ranks, unless the others have slots to spare."""
    if not lost or not request.hosts:
        return request
    names = [host.name for host in request.hosts]
    gone = {name for one in lost for name in same_hosts(one, names)}
    left = tuple(host for host in request.hosts if host.name not in gone)
    before, slots = (sum(host.slots for host in hosts) for hosts in (request.hosts, left))
    # More ranks than slots were asked for: they are not pushed together any closer.
    ranks = request.ranks * slots // before if request.ranks > before else min(request.ranks, slots)
    return dataclasses.replace(request, hosts=left, ranks=max(ranks, bool(slots)))


def _places(before: Request, after: Request) -> str:
    gone = [host.name for host in before.hosts if host not in after.hosts]
    return f", without {', '.join(gone)}" if gone else ""


def promise(policy: Policy, request: Request, origin: str) -> str:
    """What a job survives, told before it starts."""
    losses = "the loss of ranks" + ", and of hosts other than this one" * (len(request.hosts) > 1)
    least = f", down to {counted(policy.min_ranks, 'rank')}" * (len(request.hosts) > 1)
    restarts = counted(policy.restarts, "restart")
    return f"survives {losses}, by at most {restarts}{least}: {origin}"
