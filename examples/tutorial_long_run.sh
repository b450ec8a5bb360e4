#!/bin/bash
#SBATCH --job-name=fit
#SBATCH --time=12:00:00
#SBATCH --cpus-per-task=4
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300

# The same line begins the run and goes on with it. Five minutes before the time is up SLURM sends
# SIGTERM: the segment at hand is stored, and Python leaves. Exit status 75: not finished yet.
srun python -u fit.py
[ $? -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
