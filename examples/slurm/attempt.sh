#!/usr/bin/env bash
# One attempt at a run under Slurm, and what its exit code is followed by. The .sbatch files here end in it:
#
#     exec bash examples/slurm/attempt.sh NAME CONFIG.yaml [section.field=value ...]
#
#     0        done
#     2, 93    would fail again (configuration; see docs/running.md): not requeued
#     85       checkpointed, because the time is up: requeued
#     other    a crash or a hang: requeued
# Two attempts in a row without a newer checkpoint are followed by 93 instead of a third, however they ended.
#
# The same NAME continues that run (--resume, where its folder holds one); another NAME starts a new one.
# Logs: runs/NAME/attempts/JOBID.RESTART/rank-N.log, and runs/NAME/attempts/latest/.
set -euo pipefail

PYTHON=${PYTHON:-.venv/bin/python} # on every node
ROOT=${ROOT:-runs}                 # on a file system that all nodes share
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

name=$1 config=$2
shift 2
checkpoints=$ROOT/$name/checkpoints attempts=$ROOT/$name/attempts
attempt=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
started=$attempts/started # a line per attempt since the job was submitted: ATTEMPT and the step it began with

say() { echo "$(date -u +%FT%TZ) $name $attempt: $*" >&2; }
newest() { # the number of the step that the program would go on from; 0 without one
    local step
    step=$(head -c 64 "$checkpoints/LATEST" 2>/dev/null | tr -d '\0' || true)
    if [[ ! $step =~ ^step_[0-9]+$ ]]; then # a damaged LATEST: the highest step that is there
        step=$(find "$checkpoints" -maxdepth 1 -name 'step_*' 2>/dev/null |
            sed -En 's/.*\/(step_[0-9]+)$/\1/p' | sort -V | tail -n 1 || true)
    fi
    step=${step#step_}
    echo "${step:-0}"
}
verdict() { # 2 or 93 where the first rank ended with it: srun tells the highest code, that of a killed rank too
    sed -En 's/^\{"code": (2|93), .*/\1/p' "$ROOT/$name/exit.json" 2>/dev/null || true
}
stop_without_progress() {
    if (($(tail -n 2 "$started" | awk -v step="$(newest)" '$2 >= step' | wc -l) >= 2)); then
        say "not started again: two attempts without a newer checkpoint than step $(newest); see $attempts"
        exit 93
    fi
}

mkdir -p "$attempts/$attempt"
ln -sfn "$attempt" "$attempts/latest"
[[ ${SLURM_RESTART_COUNT:-0} != 0 && -e $started ]] || : >"$started"
stop_without_progress # Slurm itself requeues after a node failed, past the lines below
echo "$attempt $(newest)" >>"$started"
say "step $(newest), on $SLURM_JOB_NODELIST"

# One task per GPU, neighbours on one node, each free to use all of its node's cores and GPUs. The task is the
# program itself, without a shell around it: Slurm's signals go to tasks, not to their children.
# The first task to end leaves the others two minutes: enough to end by themselves, not enough to hang.
code=0 resume=()
[[ ! -e $ROOT/$name/config.yaml && ! -e $checkpoints ]] || resume=(--resume)
rm -f "$ROOT/$name/exit.json"
srun --distribution=block --cpu-bind=none --kill-on-bad-exit=0 --wait=120 \
    --output="$attempts/$attempt/rank-%t.log" \
    "$PYTHON" -m megatron_stppo train "$config" run.name="$name" run.root="$ROOT" "$@" "${resume[@]}" || code=$?
judged=$(verdict)
code=${judged:-$code}
say "exit code $code, step $(newest)"

case $code in
0 | 2 | 93) exit "$code" ;;
esac
stop_without_progress
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
