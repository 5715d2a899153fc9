"""What a job ends with, beside 0, the 1 and 2 of `errors`, and the codes of its program."""

import signal

from mpitrain.runtime.signals import STOPPING

STALLED = 75  # a rank did not come within --stall-abort
STOPPED = 85  # by a signal, with a checkpoint: the same command goes on from it (HTCondor's customary code for that)
BY_SIGNAL = 128  # and the number of the signal, as shells count it
INTERRUPTED = BY_SIGNAL + signal.SIGINT
TERMINATED = BY_SIGNAL + signal.SIGTERM
ON_PURPOSE = (STOPPED, *(BY_SIGNAL + number for number in STOPPING))  # a signal that asks for the end had come
