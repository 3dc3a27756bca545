#!/usr/bin/env bash
# One attempt at a run under Slurm, and what its exit code is followed by. The .sbatch files here end in it:
#
#     exec bash examples/slurm/attempt.sh NAME CONFIG.yaml [section.field=value ...]
#
#     0        done
#     2, 93    would fail again (configuration; see README.md, "Exit codes"): not requeued
#     85       checkpointed, because the time is up: requeued
#     other    a crash or a hang: requeued
# Two attempts in a row that publish no newer checkpoint are followed by 93 instead of a requeue.
#
# It always resumes: the same NAME goes on with that run, another NAME starts a new one.
# Logs: runs/NAME/attempts/JOBID.RESTART/rank-N.log, and runs/NAME/attempts/latest/.
set -euo pipefail

PYTHON=${PYTHON:-.venv/bin/python} # on every node
ROOT=${ROOT:-runs}                 # on a file system that all nodes share
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

name=$1 config=$2
shift 2
checkpoints=$ROOT/$name/checkpoints attempts=$ROOT/$name/attempts
attempt=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
idle=$attempts/without-progress # one line per attempt since the last that published a checkpoint

say() { echo "$(date -u +%FT%TZ) $name $attempt: $*" >&2; }
newest() { # the number of the newest published step; 0 without one
    local step
    step=$(cat "$checkpoints/LATEST" 2>/dev/null || true)
    step=${step#step_}
    [[ $step =~ ^[0-9]+$ ]] && echo "$step" || echo 0
}

mkdir -p "$attempts/$attempt"
ln -sfn "$attempt" "$attempts/latest"
[[ ${SLURM_RESTART_COUNT:-0} != 0 ]] || rm -f "$idle"
before=$(newest)
say "step $before, on $SLURM_JOB_NODELIST"

# One task per GPU, neighbours on one node, each free to use all of its node's cores and GPUs. The task is the
# program itself, without a shell around it: Slurm's signals go to tasks, not to their children.
# The first task to end leaves the others two minutes: enough to end by themselves, not enough to hang.
code=0
srun --distribution=block --cpu-bind=none --kill-on-bad-exit=0 --wait=120 \
    --output="$attempts/$attempt/rank-%t.log" \
    "$PYTHON" -m megatron_stppo train "$config" run.name="$name" run.root="$ROOT" "$@" --resume || code=$?
after=$(newest)
say "exit code $code, step $after"

case $code in
0 | 2 | 93) exit "$code" ;;
esac
if ((after > before)); then
    rm -f "$idle"
else
    echo "$attempt exit code $code, step $after" >>"$idle"
    if (($(wc -l <"$idle") >= 2)); then
        say "not requeued: two attempts without a newer checkpoint; see $attempts/latest/"
        exit 93
    fi
fi
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
