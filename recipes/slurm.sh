#!/usr/bin/env bash
# trew as a Slurm job: ranks on one node or several, continued where the job before was ended.
#
#     sbatch --nodes=1 recipes/slurm.sh recipes/gsm8k-node.toml                  trew starts ranks and servers itself
#     sbatch --nodes=2 recipes/slurm.sh recipes/gsm8k-1gpu.toml cluster.shard=hsdp     one rank for each GPU of each node
#
# After the recipe come settings, as after --set. The run folder ($OUT, default runs/slurm-<recipe>) must be on a file
# system that all nodes share. Adapt the lines below to your cluster; activate the environment with trew before sbatch,
# or here. Servers are started on one node only: on several nodes the ranks generate, or cluster.endpoints names servers.
#SBATCH --job-name=trew
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
# TERM@600: ten minutes before the time is up the run ends its step and saves. torchrun leaves it this many seconds;
# versions of torch that do not know the variable leave 30, too few for large checkpoints.
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540

recipe=${1:?which recipe? sbatch recipes/slurm.sh RECIPE [KEY=VALUE ...]}
shift
out=${OUT:-runs/slurm-$(basename "$recipe" .toml)}
nodes=${SLURM_JOB_NUM_NODES:?this is a job for sbatch}
options=(--out "$out")
if [ -e "$out/checkpoints" ]; then options+=(--resume); fi

if [ "$nodes" = 1 ]; then
  if [ $# -gt 0 ]; then options+=(--set "$@"); fi
  exec srun --kill-on-bad-exit=1 trew train "$recipe" "${options[@]}"
fi

# learner = 0: as many ranks as torchrun starts. A rank that dies ends all; torchrun starts them again from the newest
# checkpoint, three times.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
exec srun --kill-on-bad-exit=1 torchrun --nnodes "$nodes" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --max-restarts 3 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29400}" \
  -m trew train "$recipe" "${options[@]}" --set cluster.learner=0 "$@"
