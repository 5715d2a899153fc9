"""`mpitrain run`: starts ranks here, on other hosts, or in a batch job's allocation, with the MPI that is in use."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mpitrain.cli.job_options import JobOptions
from mpitrain.cli.main import parsed
from mpitrain.cli.parser import Parser
from mpitrain.config import build, options, read_file
from mpitrain.errors import AgreedError, LauncherError, UsageError
from mpitrain.faults.options import SHRINK
from mpitrain.launch import allocation, dialect, restart_policy
from mpitrain.launch.commands import Command
from mpitrain.launch.daemonless.starter import is_here
from mpitrain.launch.dialect import Mpi
from mpitrain.launch.job import OURS, LaunchJob, check_root, choose_srun, rank_command
from mpitrain.launch.listener import Listener
from mpitrain.launch.preflight import find_unreached
from mpitrain.launch.request import BINDINGS, FORWARDED, MAPPINGS, Request, count_ranks, forwarded
from mpitrain.launch.restart import run_with_restarts, tell
from mpitrain.launch.restart_policy import ABORT, RESTART, RESTARTS, NextAttempt, Restarts
from mpitrain.launch.shrinkable_job import SURVIVED, allow_shrink
from mpitrain.launch.shrinkable_job import promise as survival_promise
from mpitrain.launch.ssh import CONNECT_TIMEOUT_SECONDS, Ssh, from_environment
from mpitrain.launch.ssh_program import NO_CONNECTION, SshProgram
from mpitrain.launch.supervisor import Outcome, Plan, Supervisor
from mpitrain.runtime import launcher, process_tree, string_hashes
from mpitrain.runtime.marks import RESUME_VARIABLE, RUN_VARIABLE
from mpitrain.runtime.output_files import OUTPUT_VARIABLE
from mpitrain.runtime.threads import physical_cores

USAGE = """mpitrain run -np N [options] [arguments of mpitrain]
       mpitrain run -np N [options] script.py [its arguments]
       mpitrain run -np N [options] -m module [its arguments]
       mpitrain run -np N [options] program [its arguments]"""
EPILOG = "What comes after the first word that is no option of this command is for the ranks; so is what follows `--`."


def seconds(text: str) -> float:
    """Local: a time on the command line."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time: give seconds, above 0")
    return value


# Beside those of `JobOptions`: flags, and what argparse is told of each. Those of horovodrun have its names.
OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--map-by",), {"choices": MAPPINGS, "default": "slot", "help": "fill hosts (default), or in turn (node)"}),
    (("--bind-to",), {"choices": BINDINGS, "default": "none", "help": "cores that each rank stays on (default none)"}),
    (("--oversubscribe",), {"action": "store_true", "help": "allow more ranks than slots"}),
    (("--allow-run-as-root",), {"action": "store_true", "help": "as Open MPI calls it; for containers"}),
    (("-x", "--env"), {"action": "append", "default": [], "metavar": "NAME[=VALUE]", "help": "hand on a variable"}),
    (
        ("--network-interfaces", "--network-interface"),
        {"metavar": "A,B", "help": "for MPI: names, or networks such as 10.0.0.0/24"},
    ),
    (("--tag-output",), {"action": "store_true", "help": "begin each line with its rank"}),
    (("--output-filename",), {"type": Path, "metavar": "DIR", "help": "also write DIR/rank.N/stdout and stderr"}),
    (("-p", "--ssh-port"), {"type": int, "metavar": "PORT", "help": "of sshd on the hosts"}),
    (("-i", "--ssh-identity-file"), {"metavar": "FILE", "help": "private key for ssh"}),
    (
        ("--ssh-connect-timeout",),
        {"type": int, "default": CONNECT_TIMEOUT_SECONDS, "metavar": "S", "help": "of each connection; 10 s"},
    ),
    (("--start-timeout",), {"type": seconds, "default": 30.0, "metavar": "S", "help": "for the ranks to meet; 30 s"}),
    (("--kill-after",), {"type": seconds, "default": 40.0, "metavar": "S", "help": "from SIGTERM to SIGKILL; 40 s"}),
    (("--restarts",), {"type": int, "metavar": "N", "help": "times that a job that fails is started again; 0"}),
    (("--min-np",), {"type": int, "metavar": "N", "help": "ranks that must be left for that, where hosts are lost; 1"}),
    (
        ("--on-failure",),
        {
            "choices": (RESTART, SHRINK, ABORT),
            "help": f"restart means --restarts {RESTARTS}; shrink: the others go on without a rank that dies",
        },
    ),
    (("--survive",), {"choices": SURVIVED, "help": "the loss of what, with shrink (default hosts, where that can be)"}),
    (("--launcher",), {"choices": ("auto", "mpirun", "srun"), "default": "auto", "help": "in Slurm (default auto)"}),
    (("--mpirun",), {"metavar": "PATH", "help": "of the MPI; default: beside this Python, or on PATH"}),
    (("--mpi-args",), {"default": "", "metavar": "'...'", "help": "more options for mpirun or srun, as one word"}),
    (("--dry-run",), {"action": "store_true", "help": "print the command, start nothing"}),
    (("--verbose",), {"action": "store_true", "help": "print the command, too"}),
)


def add_parser(subparsers: Any) -> None:
    """Local: add `run` to the command line."""
    _add(subparsers.add_parser("run", prog="mpitrain run", usage=USAGE, description=__doc__, epilog=EPILOG))


def _add(parser: Parser) -> Parser:
    parser.add_options(options(JobOptions))
    for flags, told in OPTIONS:
        parser.add_argument(*flags, **told)
    return parser


def divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Local: the options of `run`, and what is for the ranks."""
    own, rest = _add(Parser()).divide(arguments, unknown=False)
    return own, rest[rest[:1] == ["--"] :]


def run(arguments: argparse.Namespace) -> int:
    """Local: start the job, wait for its end, and leave with its exit code.

    Raises:
        UsageError: it cannot be started as asked.
    """
    started_by = launcher.detect(os.environ)
    if started_by is not None and (started_by.size or 1) > 1:
        raise AgreedError(f"mpitrain run starts ranks, and was itself started by {started_by.name}: run it without")
    job = _job(arguments)
    policy = restart_policy.policy(arguments.on_failure, arguments.restarts, arguments.min_np, job.request.ranks)
    if arguments.on_failure == SHRINK:
        job = allow_shrink(job, policy.min_ranks, arguments.survive)
    elif arguments.survive is not None:
        raise UsageError("--survive is for jobs that go on without what was lost: add --on-failure shrink")
    ssh = from_environment(os.environ, arguments.ssh_port, arguments.ssh_identity_file, arguments.ssh_connect_timeout)
    if arguments.dry_run:
        agent = " ".join(ssh.program) if job.uses_ssh(os.environ) else None
        print(_shown(job.command(os.environ, agent, ssh.line)))
        return 0
    if job.srun is None:
        _check_interfaces(job.request.interfaces)
    _tell_allowed(job)
    if arguments.on_failure == SHRINK:
        tell(survival_promise(job, policy.min_ranks))
    if policy.restarts:
        tell(restart_policy.promise(policy, job.request, origin(job, arguments.rest)))

    def attempt(again: NextAttempt, number: int, pending: list[int]) -> Outcome:
        return _attempt(arguments, job, ssh, again, number, pending)

    return run_with_restarts(attempt, job.request, Restarts(policy), arguments.start_timeout)


def _attempt(
    arguments: argparse.Namespace, job: LaunchJob, ssh: Ssh, again: NextAttempt, number: int, pending: list[int]
) -> Outcome:
    """Local: start the job once, and wait for its end.

    `number` is that of this attempt, from 0; `pending` are signals that have come meanwhile.
    """
    secret, output = secrets.token_hex(8), arguments.output_filename and arguments.output_filename.absolute()
    if output and number:
        output /= f"restart.{number}"  # what the attempts before have written stays
    private = {
        RUN_VARIABLE: secret,
        RESUME_VARIABLE: "auto" if again.resumes else "",
        OUTPUT_VARIABLE: str(output or ""),
    }
    told = {name: value for name, value in private.items() if value}
    environment = {**string_hashes.seed(os.environ), **again.request.environment, **told}
    job = dataclasses.replace(job, request=dataclasses.replace(again.request, environment=environment))
    if job.uses_ssh(os.environ):
        names = [host.name for host in job.request.hosts if not is_here(host.name)]
        silent = find_unreached(ssh, names)
        if silent and not pending:
            sys.stderr.write("".join(f"{words}\n" for words in dict.fromkeys(silent.values()) if words))
            return Outcome(NO_CONNECTION, Listener(secret), dict.fromkeys(silent, NO_CONNECTION))
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(SshProgram(ssh)) if job.uses_ssh(os.environ) else None
        command = job.command(os.environ, str(agent.path) if agent else None, ssh.line)
        if arguments.verbose:
            tell(_shown(command))
        plan = Plan(
            command.argv,
            command.environ(dialect.path_beside(job.mpirun, launcher.without_rank(os.environ))),
            secret,
            job.launcher,
            job.request.ranks,
            job.is_ours,
            arguments.start_timeout,
            arguments.kill_after,
            output,
            job.shrinks_by_hosts,
        )
        return Supervisor(plan, agent, pending).run()


def origin(job: LaunchJob, words: Sequence[str]) -> str:
    """Local: from where a restarted job goes on, in words."""
    if not job.is_ours:
        return "from the newest of its checkpoints, where it makes some (mpitrain.callbacks.Checkpoint), else anew"
    from mpitrain.cli import script  # with NumPy, which is needed for nothing else here

    if script.divide(words)[1]:
        return "the script begins where its own BackupAndRestore lets it, else anew"
    directory = _checkpoint_directory(words)
    if directory is None:
        return "it begins anew; with --checkpoint-dir it would go on from the last checkpoint"
    return f"from the last checkpoint in {directory}"


def _checkpoint_directory(words: Sequence[str]) -> str | None:
    """Local: where the training job is told to keep its checkpoints; what is wrong there its ranks will tell."""
    parser = Parser(add_help=False)
    for flag in ("--checkpoint-dir", "--config"):
        parser.add_argument(flag)
    try:
        known, _ = parser.parse_known_args(words)
        file = read_file(Path(known.config)) if known.config else {}
    except UsageError:
        return None
    return known.checkpoint_dir or file.get("checkpoint_dir")


def _job(arguments: argparse.Namespace) -> LaunchJob:
    """Local: the job that is asked for."""
    batch = allocation.find(os.environ)
    chosen = build(JobOptions, vars(arguments))
    hosts = chosen.named_hosts() or (batch.hosts if batch else ())
    asked = chosen.num_proc
    if asked is None and batch and hosts == batch.hosts:
        asked = batch.ranks
    ranks, crowded = count_ranks(asked, hosts, physical_cores(), arguments.oversubscribe)
    mpirun = dialect.find_mpirun(os.environ, arguments.mpirun)
    environ = dialect.path_beside(mpirun, os.environ)
    command = rank_command(arguments.rest)
    mpi = _mpi(mpirun, command, arguments.rest)
    srun = choose_srun(arguments.launcher, batch, mpi, os.environ)
    interfaces = tuple((arguments.network_interfaces or "").replace(",", " ").split())
    request = Request(
        command,
        ranks,
        hosts,
        arguments.map_by,
        arguments.bind_to,
        crowded,
        check_root(mpi, arguments.allow_run_as_root, srun),
        forwarded(environ, arguments.env, FORWARDED if hosts or srun else ()),
        interfaces,
        arguments.tag_output,
        tuple(_split(arguments.mpi_args)),
    )
    return LaunchJob(request, mpi, mpirun, batch, srun)


def _check_interfaces(wanted: Sequence[str]) -> None:
    """Local: the launcher listens on this host, too."""
    names = [name for _, name in socket.if_nameindex()]
    if wanted and not any("/" in one or one in names for one in wanted):
        raise UsageError(
            f"--network-interfaces {','.join(wanted)}: this host has no such interface, but {', '.join(names)}"
        )


def _mpi(mpirun: str, command: Sequence[str], rest: Sequence[str]) -> Mpi:
    """Local: the MPI of mpirun, which must be that of the ranks where these are known. Both are asked at once.

    Meanwhile what ranks of mpitrain are given is looked at: an option that they would refuse starts nothing.
    """
    if tuple(command[: len(OURS)]) != OURS:
        return dialect.launcher_mpi(mpirun, os.environ)
    with ThreadPoolExecutor(2) as pool:
        library, refusal = pool.submit(dialect.library_mpi, os.environ), pool.submit(_refusal, rest)
        mpi = dialect.launcher_mpi(mpirun, os.environ)
        told = dialect.mismatch(mpi, library.result())
    if told:
        raise LauncherError(told)
    if refusal.result():
        raise UsageError(refusal.result())
    return mpi


def _refusal(rest: Sequence[str]) -> str:
    """Local: why ranks would refuse their options, asked in a process of its own: what they need is not loaded here."""
    options = list(itertools.takewhile(lambda word: not word.endswith(".py") and word != "-m", rest))
    if not any(word.startswith("-") for word in options):
        return ""
    command = [sys.executable, "-c", "import sys; from mpitrain.cli import run; run.refuse(sys.argv[1:])", *rest]
    asked = process_tree.ask(command, launcher.without_rank(os.environ))
    return asked.stderr.strip() if asked.returncode == UsageError.exit_code else ""


def refuse(rest: Sequence[str]) -> None:
    """Local: leave with a sentence if ranks would refuse these arguments."""
    try:
        parsed(list(rest), _add(Parser()).flags())
    except UsageError as error:
        sys.stderr.write(str(error))
        sys.exit(error.exit_code)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--mpi-args {text!r} cannot be split into words: {error}") from error


def _shown(command: Command) -> str:
    """A command as one would type it."""
    settings = {**command.defaults, **command.environment}
    changed = [f"{name}={value}" for name, value in settings.items() if os.environ.get(name) != value]
    return shlex.join([*(["env", *changed] if changed else []), *command.argv])


def _tell_allowed(job: LaunchJob) -> None:
    """What is allowed that is not so by itself."""
    request = job.request
    said = [f"more ranks than slots ({request.ranks}): they share cores"] * request.oversubscribe
    said += ["ranks run as root"] * request.allow_root
    if said:
        tell(f"{job.mpi}; {'; '.join(said)}")
