"""Lists of hosts, in every dialect that launchers have.

One entry a line, or several separated by commas or blanks:

    node1 slots=4 max_slots=8      Open MPI
    node1:4                        MPICH (Hydra), Intel MPI, and -H of mpirun
    node[01-16,20]                 Slurm
    node1                          one slot, and one more each time it is named (PBS, LSF)

What follows `#` is a comment; blanks and tabs are alike, also around `=`. A host that is named again has the slots of
all its entries, as MPICH has it; where `slots=` says how many, it stands once for a host, as Open MPI wants it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.runtime.counted import counted

DIALECTS = ("openmpi", "mpich", "slurm", "list")
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
OPTION = re.compile(r"(slots|max[_-]slots|max-slots)=(.*)", re.ASCII)
MOST_HOSTS = 100_000  # more is a slip of the pen
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
SLOTS = re.compile(r"0*[1-9]\d{0,5}", re.ASCII)
BYTE_ORDER_MARK = "\ufeff"  # which editors of Windows write


class HostfileError(UsageError):
    """A list of hosts cannot be read."""


@dataclass(frozen=True)
class Host:
    """One host of a job."""

    name: str  # as the launcher is to find it
    slots: int = 1  # how many ranks it takes
    max_slots: int | None = None  # how many it takes at most, where that is said


def parse(text: str, source: str = "hosts") -> tuple[Host, ...]:
    """Hosts in the order in which they are first named.

    The text is that of a hostfile, of `-H`, or of a Slurm node list.

    Raises:
        HostfileError: with file and line, what is wrong there; or the list is empty.
    """
    found: dict[str, Host] = {}
    said: dict[str, set[str]] = {}  # what was given for a host: `:`, `slots`, `max_slots`
    for number, line in enumerate(text.removeprefix(BYTE_ORDER_MARK).splitlines(), start=1):
        place = f"{source}:{number}"
        for entry in _entries(line.partition("#")[0], place):
            for host, given in _hosts(entry, place):
                _check_again(host, given, said.get(host.name), found.get(host.name), place)
                said[host.name] = said.get(host.name, set()) | given
                found[host.name] = _added(found.get(host.name), host)
                if len(found) > MOST_HOSTS:
                    raise HostfileError(f"{place}: these are more than {MOST_HOSTS:,} hosts")
    if not found:
        raise HostfileError(f"{source} names no host")
    for host in found.values():
        if host.max_slots is not None and host.slots > host.max_slots:
            raise HostfileError(
                f"{source}: {host.name} has {host.slots} slots, more than its max_slots={host.max_slots}"
            )
    return tuple(found.values())


def read(path: str) -> tuple[Host, ...]:
    """Local: the hosts in a file; `-` is the standard input.

    Raises:
        UsageError: the file cannot be read, or as `parse` does.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the hostfile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name, or bytes that are none of UTF-8
        raise UsageError(f"the hostfile {path} cannot be read: it is no text in UTF-8 ({error})") from error
    return parse(text, path)


def render(hosts: Sequence[Host], dialect: str) -> str:
    """Hosts in one dialect: `openmpi`, `mpich`, `slurm` (the names alone), or `list` (as for `-H`).

    Raises:
        HostfileError: there is no such dialect.
    """
    if dialect == "openmpi":
        return "".join(
            f"{h.name} slots={h.slots}{'' if h.max_slots is None else f' max_slots={h.max_slots}'}\n" for h in hosts
        )
    if dialect == "mpich":
        return "".join(f"{h.name}:{h.slots}\n" for h in hosts)
    if dialect == "slurm":
        return ",".join(h.name for h in hosts) + "\n"
    if dialect == "list":
        return ",".join(f"{h.name}:{h.slots}" for h in hosts) + "\n"
    raise HostfileError(f"there is no dialect {dialect!r}: name one of {', '.join(DIALECTS)}")


def is_same_host(one: str, other: str) -> bool:
    """Whether two names are of one host: some say it with its domain, some without."""
    return one == other or one.partition(".")[0] == other or other.partition(".")[0] == one


def same_hosts(name: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that are of this host: itself; only where that is not there, with and without its domain."""
    return [name] if name in names else [other for other in names if is_same_host(name, other)]


def _check_again(host: Host, given: set[str], said: set[str] | None, before: Host | None, place: str) -> None:
    """Of a host that is named again, what may mean that or a sum."""
    if before is None or said is None:
        return
    if "slots" in given or (":" in given and "slots" in said):
        raise HostfileError(
            f"{place}: {host.name} was named before, with {counted(before.slots, 'slot')}, and here with {host.slots}: "
            "name it once, with all its slots"
        )
    if host.max_slots != before.max_slots and {"max_slots"} <= given & said:
        raise HostfileError(
            f"{place}: {host.name} was named before, with max_slots={before.max_slots}, and here with "
            f"max_slots={host.max_slots}: name it once"
        )


def _added(before: Host | None, host: Host) -> Host:
    if before is None:
        return host
    limits = [limit for limit in (before.max_slots, host.max_slots) if limit is not None]
    return Host(host.name, before.slots + host.slots, max(limits) if limits else None)


def _entries(line: str, place: str) -> Iterator[list[str]]:
    """The words of each entry of a line: the host, then its options."""
    words = [word for word in re.split(r"[\s,]+(?![^\[]*\])", re.sub(r"\s*=\s*", "=", line)) if word]
    entry: list[str] = []
    for word in words:
        if "=" not in word and entry:
            yield entry
            entry = []
        if "=" in word and not entry:
            raise HostfileError(f"{place}: {word!r} stands before any host")
        entry.append(word)
    if entry:
        yield entry


def _hosts(entry: Sequence[str], place: str) -> Iterator[tuple[Host, set[str]]]:
    """The hosts of an entry, and what was given for them."""
    _check_kind(entry[0], place)
    name, colon, count = entry[0].partition(":")
    slots = _number(count, "slots", place) if colon else None
    limit, given = None, {colon} if colon else set()
    for option in entry[1:]:
        match = OPTION.fullmatch(option)
        if match is None:
            raise HostfileError(f"{place}: {option!r} is not understood: hosts have slots=N and max_slots=N")
        what = match[1].replace("-", "_")
        if what in given or (what == "slots" and colon):
            raise HostfileError(f"{place}: {name} has {what} twice: give it once")
        given.add(what)
        if what == "slots":
            slots = _number(match[2], what, place)
        else:
            limit = _number(match[2], what, place)
    for one in _expanded(name, place):
        if not NAME.fullmatch(one) or one.isdigit():
            raise HostfileError(f"{place}: {one!r} is no name of a host")
        yield Host(one, 1 if slots is None else slots, limit), given


def _check_kind(word: str, place: str) -> None:
    """Of what stands where a host should, what is known not to be one."""
    user, at, host = word.rpartition("@")
    if at:
        raise HostfileError(
            f"{place}: {word!r} names a user, which launchers do not take: write {host or 'the host'}, and name the "
            f"user in ~/.ssh/config (Host {host.partition(':')[0] or 'NAME'}, then User {user or 'NAME'})"
        )
    if word.isdigit() or word.lower() in ("slot", "slots", "max_slots", "max-slots"):
        raise HostfileError(f"{place}: {word!r} is no host: the slots of a host are written node1 slots=2, or node1:2")
    if word.count(":") > 1 and _is_ipv6(word):
        raise HostfileError(
            f"{place}: {word!r} is an IPv6 address, in which launchers take what follows a colon for slots: give it "
            "a name, in /etc/hosts or in ~/.ssh/config"
        )


def _is_ipv6(word: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(word.removeprefix("[").partition("]")[0].partition("%")[0]))
    return False


def _number(text: str, what: str, place: str) -> int:
    if not SLOTS.fullmatch(text):
        raise HostfileError(f"{place}: {what} must be a whole number above 0, not {text[:20]!r}")
    return int(text)


def _expanded(name: str, place: str) -> Iterator[str]:
    """`node[01-03,7]` is node01, node02, node03, node7; several brackets multiply."""
    head, bracket, rest = name.partition("[")
    if not bracket:
        if "]" in name:
            raise HostfileError(f"{place}: {name!r} has a ] without a [")
        yield name
        return
    inside, closed, tail = rest.partition("]")
    if not closed:
        raise HostfileError(f"{place}: {name!r} has a [ without a ]")
    for part in inside.split(","):
        match = RANGE.fullmatch(part.strip())
        first = match[1] if match else ""
        last = (match[2] or first) if match else ""
        if match is None or not 0 <= int(last) - int(first) < MOST_HOSTS:
            raise HostfileError(f"{place}: {part!r} in {name!r} is no range such as 01-16")
        for number in range(int(first), int(last) + 1):
            yield from _expanded(f"{head}{number:0{len(first)}d}{tail}", place)
