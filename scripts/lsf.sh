#!/bin/bash
# LSF: bsub < scripts/lsf.sh, or with arguments: ARGUMENTS="train.py --epochs 3" bsub < scripts/lsf.sh
# The arguments are those of `python -m mpitrain`: none, options of the training job, or a script with its own.
# A rank is a slot. Take what fits from below, or give it to bsub, which wins over the lines here.
#BSUB -J mpitrain
#BSUB -n 2
#BSUB -R "span[ptile=1]"
#BSUB -W 1:00
#BSUB -o mpitrain-%J.log
# Four GPUs a host, a rank for each:
##BSUB -n 8
##BSUB -R "span[ptile=4]"
##BSUB -gpu "num=4:mode=exclusive_process"
set -euo pipefail
cd "${LS_SUBCWD:-.}"
# A file that bsub reads has no arguments of its own: they come as a text, which is taken apart at blanks.
read -r -a arguments <<<"${ARGUMENTS:-}"
# `mpitrain run` takes the hosts from LSB_MCPU_HOSTS.
exec "${PYTHON:-.venv/bin/python}" -m mpitrain run "${arguments[@]}"
