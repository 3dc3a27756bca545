# shellcheck shell=bash disable=SC2034 # the scripts that source this file use its variables
# How the scripts in this folder start ranks. Edit the variables, or set them in the environment of sbatch. The scripts
# source this file in the repository's root. It sets `launch`, srun with its options, and `python`, which srun starts.
#
# The program is installed on the nodes in one of two ways:
# - An environment that every node sees: PYTHON. `make .venv-gpu` makes the one that is the default.
# - The image of the Dockerfile, with pyxis, a plugin of srun: IMAGE=/images/megatron-stppo.sqsh. The batch script, srun
#   and scontrol still run outside the image. docs/cluster.md, "In a container", has the rest.

IMAGE=${IMAGE:-}   # a squashfs file that every node can read, or REGISTRY#NAME:TAG; empty: no container
MOUNTS=${MOUNTS:-} # more folders for the image, such as /models:/models,/data:/data; keep their paths
ROOT=${ROOT:-runs} # on a file system shared by all nodes
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # for the small tensors of a rank on a GPU, threads cost more than they gain
# Compiled code is kept beside the runs. The home folder of an image ends with the attempt, and the next one would
# compile again, for minutes. The real path, because that is mounted into an image.
caches=$(realpath -m "$ROOT")/.cache
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$caches/vllm}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$caches/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$caches/inductor}
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$caches/flashinfer}

# There is one task per GPU. Consecutive tasks are on one node, and each may use all cores and GPUs of its node. The
# task is the program itself, without a shell around it, because Slurm sends signals to tasks, not to their children.
# After the first task ends, the others have two minutes to end by themselves; then Slurm kills them.
launch=(srun --distribution=block --cpu-bind=none --kill-on-bad-exit=0 --wait=120)
python=("${PYTHON:-.venv-gpu/bin/python}") # on every node

if [[ -n $IMAGE ]]; then
    # -P: the package that the image has installed, with its CUDA kernels, and not the one in the working directory.
    python=("${PYTHON:-/opt/venv/bin/python}" -P)
    # The repository and the runs keep their paths, because the batch script uses the same files from outside.
    mounts=$PWD:$PWD
    # Not only an absolute ROOT can be outside of the repository: also ../runs, or a link to another file system.
    mkdir -p "$ROOT"
    for folder in "$(cd "$ROOT" && pwd)" "$(realpath "$ROOT")"; do
        [[ $folder/ == "$PWD"/* || ,$mounts, == *,"$folder:$folder",* ]] || mounts+=,$folder:$folder
    done
    # Writable: the driver and some packages write into the home folder of the image. The user's home folder is not
    # mounted, because Python would import packages from its .local. Without --no-container-entrypoint, a cluster may be
    # configured to start `megatron-stppo` with our command as its arguments.
    launch+=(--container-image="$IMAGE" --container-mounts="$mounts${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD"
        --container-writable --no-container-mount-home --no-container-entrypoint)
fi
