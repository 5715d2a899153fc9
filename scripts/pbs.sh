#!/bin/bash
# PBS, Torque: qsub scripts/pbs.sh, or with arguments: qsub -v ARGUMENTS="train.py --epochs 3" scripts/pbs.sh
# The arguments are those of `python -m mpitrain`: none, options of the training job, or a script with its own.
# A rank is an MPI process. Take what fits from below, or give it to qsub, which wins over the lines here.
#PBS -N mpitrain
#PBS -l select=2:ncpus=4:mpiprocs=1
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
# Four GPUs a host, a rank for each:
##PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"
# PBS hands over no words but a text: it is taken apart at blanks.
read -r -a arguments <<<"${ARGUMENTS:-}"
# `mpitrain run` takes the hosts from PBS_NODEFILE, where each has a line for each MPI process.
exec "${PYTHON:-.venv/bin/python}" -m mpitrain run "${arguments[@]}"
