"""`mpitrain hosts convert FILE --to DIALECT`: a list of hosts in the words of another launcher."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.runtime.hostfile import DIALECTS, parse, render


def add_parser(subparsers: Any) -> None:
    """Local: add `hosts` to the command line."""
    parser = subparsers.add_parser("hosts", prog="mpitrain hosts", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    convert = verbs.add_parser("convert", help="print a hostfile in another dialect")
    convert.add_argument("file", help="any dialect; - is the standard input")
    convert.add_argument("--to", choices=DIALECTS, default="openmpi", help="default openmpi")


def run(arguments: argparse.Namespace) -> int:
    """Local: print the hosts.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{arguments.file} cannot be read: {error}") from error
    sys.stdout.write(render(parse(text, arguments.file), arguments.to))
    return 0
