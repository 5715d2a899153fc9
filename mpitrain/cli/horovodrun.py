"""`horovodrun`: the options of Horovod's command, for `mpitrain run` of a script that imports horovod."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence

from mpitrain import __version__
from mpitrain.cli.main import main as mpitrain
from mpitrain.cli.parser import Parser
from mpitrain.errors import UsageError

PASSED = (  # which `mpitrain run` has too
    ("-np", "--num-proc"),
    ("-H", "--hosts"),
    ("--hostfile", "-hostfile"),
    ("-p", "--ssh-port"),
    ("-i", "--ssh-identity-file"),
    ("--start-timeout",),
    ("--network-interfaces", "--network-interface"),
    ("--output-filename",),
)
VARIABLES = {
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "MPITRAIN_STALL_WARNING",
    "--stall-check-shutdown-time-seconds": "MPITRAIN_STALL_ABORT",
}
SWITCHES = {
    "--timeline-mark-cycles": {"HOROVOD_TIMELINE_MARK_CYCLES": "1"},
    "--no-timeline-mark-cycles": {},
    "--no-stall-check": {"MPITRAIN_STALL_WARNING": "0", "MPITRAIN_STALL_ABORT": "0"},
    "--stall-check": {},
    "--mpi": {},
}
NO_EFFECT = (
    *("--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--log-level", "--num-nccl-streams"),
    *("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample", "--thread-affinity"),
    *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise", "--gloo-timeout-seconds"),
    *("--reset-limit", "--elastic-timeout", "--slots-per-host"),
)
NO_EFFECT_SWITCHES = (
    *("--disable-cache", "--autotune", "--no-autotune", "--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    *("--hierarchical-allgather", "--no-hierarchical-allgather", "--log-with-timestamp", "--log-without-timestamp"),
    *("--log-hide-timestamp", "--mpi-threads-disable", "--no-mpi-threads-disable", "--tcp", "--gloo"),
)
REFUSED = {
    "--host-discovery-script": "a job here has the hosts that it begins with: name them with -H or --hostfile",
    "--config-file": "give what stands in that file as options",
    "--jsrun": "ranks are started by mpirun or srun: see `mpitrain run --help`",
}
BUILD = """mpitrain {version} in the place of Horovod

Frameworks:
    [X] TensorFlow
    [ ] PyTorch
    [ ] MXNet

Controllers:
    [X] MPI
    [ ] Gloo

Tensor operations:
    [X] MPI
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [ ] Gloo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Local: start the job as `mpitrain run` does; where Horovod itself is installed, as Horovod does.

    Returns:
        The exit code.
    """
    if importlib.util.find_spec("horovod") is not None:
        from horovod.runner.launch import run_commandline

        return int(run_commandline() or 0)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
        if options.check_build:
            sys.stdout.write(BUILD.format(version=__version__))
            return 0
        words, useless = command(options)
    except UsageError as error:
        sys.stderr.write(f"horovodrun: {error}\n")
        return error.exit_code
    if useless:
        sys.stderr.write(f"horovodrun: of no effect here: {', '.join(useless)}\n")
    return mpitrain(words)


def command(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Local: the arguments of mpitrain that do what is asked for, and the options that have no effect.

    Raises:
        UsageError: it cannot be done.
    """
    given = vars(options)
    for flag, instead in REFUSED.items():
        if given[_name(flag)]:
            raise UsageError(f"{flag} is not supported: {instead}")
    words = ["run", "--allow-run-as-root", *(["--verbose"] if options.verbose else [])]
    if options.hosts is None and options.hostfile is None:
        words.append("--oversubscribe")  # this host has as many slots as are asked for
    for flags in PASSED:
        value = given[_name(flags[-1])]
        words += [] if value is None else [flags[0], value]
    if options.min_np is not None:
        words += ["--on-failure", "shrink", "--min-np", options.min_np]
    if options.mpi_args or options.binding_args:
        words += [f"--mpi-args={options.mpi_args} {options.binding_args}"]
    for name, value in _variables(given).items():
        words += ["-x", f"{name}={value}"]
    useless = [flag for flag in (*NO_EFFECT, *NO_EFFECT_SWITCHES) if given[_name(flag)]]
    if options.max_np is not None:
        useless.append("--max-np (no ranks come to a job that runs)")
    return [*words, *_script(options.command)], useless


def _variables(given: dict[str, str | None]) -> dict[str, str]:
    """Local: what is told to the ranks by variables."""
    found: dict[str, str] = {}
    for flag, settings in SWITCHES.items():
        if given[_name(flag)]:
            found |= settings
    for flag, name in VARIABLES.items():
        value = given[_name(flag)]
        if value is not None:
            found[name] = value
    return found


def _script(words: Sequence[str]) -> list[str]:
    """Local: what each rank runs."""
    from mpitrain.cli.script import PYTHON, divide  # with NumPy

    if not words:
        raise UsageError("what is to be run? As in: horovodrun -np 4 python train.py")
    _, script = divide(words)
    if script:
        return ["--as-horovod", *script]
    if PYTHON.fullmatch(words[0].rpartition("/")[2]):
        raise UsageError(
            f"give a script or -m and a module to Python, as in `python train.py`, not: {shlex.join(words)}"
        )
    return ["--", *words]


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _parser() -> Parser:
    parser = Parser(prog="horovodrun", description=__doc__, usage="horovodrun -np N [options] python script.py ...")
    parser.add_argument("-v", "--version", action="version", version=f"mpitrain {__version__}, in the place of Horovod")
    parser.add_argument("-cb", "--check-build", action="store_true", help="print what there is")
    parser.add_argument("--verbose", action="store_true", help="print the command, too")
    for flags in PASSED:
        parser.add_argument(*flags, dest=_name(flags[-1]), help="as for mpitrain run")
    parser.add_argument("--min-np", "--min-num-proc", help="go on without ranks that die, with so many at least")
    parser.add_argument("--max-np", "--max-num-proc", help="of no effect")
    parser.add_argument("--mpi-args", default="", help="more options for mpirun, as one word")
    parser.add_argument("--binding-args", default="", help="as --mpi-args")
    for flag, variable in VARIABLES.items():
        parser.add_argument(flag, help=f"sets {variable}")
    for flag, settings in SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=f"sets {', '.join(settings) or 'nothing: it is so'}")
    for flag in REFUSED:
        parser.add_argument(flag, nargs="?", const=True, help=argparse.SUPPRESS)
    for flag in NO_EFFECT:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in NO_EFFECT_SWITCHES:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python script.py and its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
