# The GPU environment. Versions stand in tools/constraints-gpu.txt, each with its reason. No Docker daemon has built
# this file yet; what of it runs without one, and without a GPU, tools/check_dockerfile.py runs.
#
#     docker build -t megatron-stppo .          --build-arg APEX=COMMIT adds NVIDIA's apex, of that commit
#     docker run --gpus all --ipc=host --ulimit memlock=-1 --user "$(id -u)" -e HOME=/tmp \
#         -v "$PWD/runs:/home/agent/runs" megatron-stppo doctor

# A toolkit at run time too: flashinfer and triton compile for the GPU that they find.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Ubuntu's archive keeps only the newest build of a package: a pin would break with the next update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH

# torch and vLLM, and what the next stages build with.
FROM base AS engine
COPY tools/constraints-gpu.txt /opt/constraints.txt
RUN python3.12 -m venv /opt/venv \
    && pip install --no-cache-dir --constraint /opt/constraints.txt ninja packaging pybind11 setuptools wheel \
    && pip install --no-cache-dir --constraint /opt/constraints.txt torch vllm

# The package transformer-engine alone is empty: the core library is -cu13, the bindings to torch are -torch, which
# is source. Its build would rather download a wheel for a torch of its own choice.
FROM engine AS transformer-engine
ENV NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=8
RUN pip wheel --no-cache-dir --constraint /opt/constraints.txt --no-deps --no-build-isolation \
    --wheel-dir /wheels/transformer-engine transformer-engine transformer-engine-cu13 transformer-engine-torch

# Optional. PyPI's apex is another project.
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
# countryinfo and mendeleev are the quickstart's facts.
RUN pip install --no-cache-dir --constraint /opt/constraints.txt /wheels/*/*.whl countryinfo mendeleev

FROM base
COPY --from=packages /opt/venv /opt/venv
WORKDIR /home/agent
COPY examples examples
RUN useradd --uid 10001 --home-dir /home/agent agent && mkdir runs && chown -R agent: /home/agent
USER 10001
HEALTHCHECK --interval=10m --timeout=2m --start-period=1m CMD ["megatron-stppo", "doctor"]
ENTRYPOINT ["megatron-stppo"]
CMD ["doctor"]
