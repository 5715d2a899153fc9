"""`mpitrain hosts convert FILE --to DIALECT`: a list of hosts in the words of another launcher."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mpitrain.runtime.hostfile import DIALECTS, read, render


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
    sys.stdout.write(render(read(arguments.file), arguments.to))
    return 0
