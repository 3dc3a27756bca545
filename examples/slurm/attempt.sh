#!/usr/bin/env bash
# Make one attempt at a run under Slurm, and requeue the job depending on the exit code. The .sbatch files end with:
#
#     exec bash examples/slurm/attempt.sh NAME CONFIG.yaml [section.field=value ...]
#
#     exit code
#     0        done
#     2, 93    the next attempt would fail too (configuration; see docs/cluster.md): not requeued
#     85       checkpointed, because the time limit is near: requeued
#     other    a crash or a hang: requeued
# After two attempts in a row without a newer checkpoint, the script exits with 93. Attempts that were killed from outside,
# by a preemption or the failure of a node, or that ended with 85 before there was one, are counted by themselves, up to
# ten.
#
# The same NAME continues that run (with --resume, if its folder has one). Another NAME starts a new run.
# Logs: runs/NAME/attempts/JOBID.RESTART/rank-N.log, and runs/NAME/attempts/latest/.
# With REPLICAS=n the last nodes of the job serve (asynchronous training): see replicas.sh.
set -euo pipefail

# The environment or the image, and the folder of the runs: see the top of that file.
source examples/slurm/settings.sh
source examples/slurm/replicas.sh

name=$1 config=$2
shift 2
checkpoints=$ROOT/$name/checkpoints attempts=$ROOT/$name/attempts
attempt=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
# One line "ATTEMPT STEP" per attempt since the job was submitted, and "ATTEMPT STEP ended" if it was not killed from
# outside and did not end with 85. STEP is where it began.
started=$attempts/started

say() { echo "$(date -u +%FT%TZ) $name $attempt: $*" >&2; }
newest() { # print the step from which the program would resume; 0 without a checkpoint
    local step
    step=$(head -c 64 "$checkpoints/LATEST" 2>/dev/null | tr -d '\0' || true)
    if [[ ! $step =~ ^step_[0-9]+$ ]]; then # LATEST is damaged: use the highest step in the folder
        step=$(find "$checkpoints" -maxdepth 1 -name 'step_*' 2>/dev/null |
            sed -En 's/.*\/(step_[0-9]+)$/\1/p' | sort -V | tail -n 1 || true)
    fi
    step=${step#step_}
    echo "${step:-0}"
}
verdict() { # print 2 or 93 if the first rank exited with it; srun returns the highest code, also of killed ranks
    sed -En 's/^\{"code": (2|93), .*/\1/p' "$ROOT/$name/exit.json" 2>/dev/null || true
}
stop_without_progress() {
    local step ended killed
    step=$(newest)
    read -r ended killed < <(awk -v step="$step" '
        $2 < step { ended = killed = 0; next }
        $3 == "ended" { ended++; next }
        { killed++ }
        END { print ended + 0, killed + 0 }' "$started")
    if ((ended >= 2)); then
        say "not started again: two attempts without a newer checkpoint than step $step; see $attempts"
        exit 93
    elif ((killed >= 10)); then
        say "not started again: ten attempts without a newer checkpoint than step $step were killed from outside, or ended" \
            "with 85; see $attempts, and lower run.checkpoint_every if they had no time to write one"
        exit 93
    fi
}

refuse_arguments() {
    local given
    for given in "$@"; do
        if [[ $given == run.name=* || $given == run.root=* ]]; then
            say "$given: the name of the run is that of the job, and its folder is ROOT: sbatch --job-name=NAME, ROOT=FOLDER"
            exit 2
        fi
    done
    if [[ -z $IMAGE ]] && ! command -v "${python[0]}" >/dev/null; then
        say "PYTHON=${python[0]}: no such program; make .venv-gpu installs it, or name another one: PYTHON=... sbatch ..."
        exit 2
    fi
}

refuse_if_in_use() { # before anything of the run that uses the folder is overwritten; it renews the lock every 2 s
    local lock=$ROOT/$name/lock renewed
    [[ -s $lock ]] || return 0
    renewed=$(stat -c %y "$lock")
    sleep 3
    [[ -s $lock && $(stat -c %y "$lock") != "$renewed" ]] || return 0
    say "$ROOT/$name is in use by $(head -c 300 "$lock"); wait until it ends, or give another name"
    exit 2
}

refuse_arguments "$@"
refuse_if_in_use
mkdir -p "$attempts/$attempt"
ln -sfn "$attempt" "$attempts/latest"
[[ ${SLURM_RESTART_COUNT:-0} != 0 && -e $started ]] || : >"$started"
stop_without_progress # after a node failure Slurm requeues the job without running the end of this script
echo "$attempt $(newest)" >>"$started"
say "step $(newest), on $SLURM_JOB_NODELIST"

code=0 resume=()
[[ ! -e $ROOT/$name/config.yaml && ! -e $checkpoints ]] || resume=(--resume)
rm -f "$ROOT/$name/exit.json"
start_replicas "$ROOT/$name" "$attempts/$attempt"
"${launch[@]}" "${training[@]}" --output="$attempts/$attempt/rank-%t.log" "${python[@]}" -m megatron_stppo train "$config" \
    run.name="$name" run.root="$ROOT" "${asynchronous[@]}" "$@" "${resume[@]}" || code=$?
[[ $code == 85 ]] || sed -i '$ s/$/ ended/' "$started" || say "$started cannot be written; this attempt counts as killed from outside"
stop_replicas
judged=$(verdict)
code=${judged:-$code}
say "exit code $code, step $(newest)"

case $code in
0 | 2 | 93) exit "$code" ;;
esac
stop_without_progress
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
