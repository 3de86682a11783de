#!/bin/bash
# SLURM, 4 machines with 8 GPUs: sbatch examples/clusters/slurm.sh train.py --epochs 3
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --output=%x-%j.log

# One task for each machine, which starts a process for each GPU. Rank, size and address come from SLURM.
# Two minutes before the end of its time the job is told, saves (accelerator.should_stop) and ends with code 75.
# It is queued again, and --resume auto goes on from the newest checkpoint.
srun accelerate launch --mixed_precision bf16 --resume auto "$@"
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
