# shellcheck shell=bash disable=SC2034,SC2154 # attempt.sh sets variables of this file, and uses variables that it sets
# Replicas of asynchronous training, as job steps beside the step that trains. attempt.sh sources this file. Set the
# variables in the .sbatch file, or in the environment of sbatch:
#
#     REPLICAS        number of replicas; 0, the default: all nodes train, and serve in turn
#     REPLICA_GPUS    GPUs of a replica, which are on one node; sets rollout.engine_tensor. Default: 1
#     TRAIN_NODES     number of nodes that train, the first of the job. The others serve. Default: all but the last
#                     ones, of which there are as many as the replicas need
#     REPLICA_CPUS    CPUs per GPU of a replica. Default: its share of the node
#     REPLICA_EVERY   smallest number of seconds between two starts of a replica. Default: 60
#
# Slurm divides a node among steps, so that those that run at the same time have GPUs and CPUs of their own; this is
# srun's default without --overlap. With --exact a step has only what it asks for (Slurm 21.08 or later). Each rank sees
# all GPUs of its step. Steps do not divide memory (--mem=0).
# Output: runs/NAME/attempts/JOBID.RESTART/replica-N.rank-M.log; that of all starts of a replica in an attempt.

REPLICAS=${REPLICAS:-0}
REPLICA_EVERY=${REPLICA_EVERY:-60}
REPLICA_GRACE=${REPLICA_GRACE:-20} # seconds that a replica has to end, once when training has ended and once when killed
training=()                        # srun's options for the step that trains
asynchronous=()                    # fields of its configuration

if ((REPLICAS)); then
    REPLICA_GPUS=${REPLICA_GPUS:-1}
    gpus=${SLURM_NTASKS_PER_NODE:?give sbatch --ntasks-per-node} # per node: one for each task that trains
    per_node=$((gpus / REPLICA_GPUS)) serve_nodes=0
    ((per_node == 0)) || serve_nodes=$(((REPLICAS + per_node - 1) / per_node))
    TRAIN_NODES=${TRAIN_NODES:-$((SLURM_JOB_NUM_NODES - serve_nodes))}
    if ((serve_nodes == 0 || TRAIN_NODES < 1 || TRAIN_NODES + serve_nodes > SLURM_JOB_NUM_NODES)); then
        echo "REPLICAS=$REPLICAS REPLICA_GPUS=$REPLICA_GPUS TRAIN_NODES=$TRAIN_NODES: do not fit on" \
            "$SLURM_JOB_NUM_NODES nodes of $gpus GPUs; request more nodes, or start fewer replicas" >&2
        exit 2
    fi
    # An even number, because Slurm rounds up to whole cores, which have two CPUs each with hyper-threading.
    REPLICA_CPUS=${REPLICA_CPUS:-$((SLURM_CPUS_ON_NODE / gpus / 2 * 2))}
    ((REPLICA_CPUS)) || REPLICA_CPUS=1
    training=(--nodes="$TRAIN_NODES" --relative=0 --ntasks=$((TRAIN_NODES * gpus)))
    asynchronous=(serving.replicas="$REPLICAS" serving.start=false rollout.engine_tensor="$REPLICA_GPUS")
fi

start_replicas() { # run all replicas in the background. $1: the run's folder, $2: the folder of their output
    local i
    for ((i = 0; i < REPLICAS; i++)); do
        keep_replica "$i" "$1" "$2" &
    done
}

stop_replicas() { # end all replicas: training has ended
    local keeper
    for keeper in $(jobs -pr); do
        kill "$keeper" 2>/dev/null || true
    done
    wait
}

keep_replica() { # run replica $1, and start it again if it dies, until training has ended
    local began code step over=""
    trap 'over=yes' TERM
    while [[ -z $over ]]; do
        began=$SECONDS code=0
        replica "$@" &
        step=$!
        while [[ -z $over ]] && kill -0 "$step" 2>/dev/null; do sleep 1; done
        [[ -z $over ]] || break
        wait "$step" || code=$?
        say "replica-$1: exit code $code; see $3/replica-$1.rank-0.log"
        ((code != 0 && code != 2)) || return 0 # it was asked to end, or a new one would end too (configuration)
        while [[ -z $over ]] && ((SECONDS - began < REPLICA_EVERY)); do sleep 1; done
    done
    # The trainer tells its replicas to end. srun kills the tasks when it gets SIGTERM. What still runs after that ends
    # with the job.
    ends "$step" || { kill "$step" 2>/dev/null && ends "$step"; } || say "replica-$1: does not end"
}

replica() { # run replica $1 of the run in $2 as a job step. Its ranks find each other without the trainer's address
    exec env -u MASTER_ADDR -u MASTER_PORT "${launch[@]}" --exact --nodes=1 --relative=$((TRAIN_NODES + $1 / per_node)) \
        --ntasks="$REPLICA_GPUS" --ntasks-per-node="$REPLICA_GPUS" --gpus-per-node="$REPLICA_GPUS" \
        --cpus-per-task="$REPLICA_CPUS" --mem=0 --wait=30 --open-mode=append --output="$3/replica-$1.rank-%t.log" \
        "${python[@]}" -m megatron_stppo serve "$2" --wait 3600 --name "replica-$1"
}

ends() { # wait until process $1 ends, for at most REPLICA_GRACE seconds
    local left
    for ((left = REPLICA_GRACE; left > 0; left--)); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 1
    done
    ! kill -0 "$1" 2>/dev/null
}
