# The GPU environment. Nobody has built this file yet; the versions are those that the CPU tests pin, or that
# torch 2.13 and vLLM 0.32 ask for. `megatron-stppo doctor` inside the image says what really got in.
#
#     docker build -t megatron-stppo .
#     docker run --user "$(id -u)" --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/runs:/home/agent/megatron-stppo/runs" megatron-stppo doctor
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS wheels
RUN apt-get update && apt-get install -y --no-install-recommends python3-dev python3-venv g++ git ninja-build \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN pip install --no-cache-dir torch==2.13.0 vllm==0.32.0 "setuptools>=77,<81" wheel pybind11
# Built against the torch above; optional at run time, as are its fused layers. Slow: 30 minutes and more.
# The package transformer-engine alone is empty: the core library is -cu13, the bindings to torch are -torch.
RUN NVTE_FRAMEWORK=pytorch MAX_JOBS=8 pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels \
    transformer-engine==2.17.1 transformer-engine-cu13==2.17.1 transformer-engine-torch==2.17.1

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3-dev python3-venv g++ make \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home agent
COPY --from=wheels /opt/venv /opt/venv
COPY --from=wheels /wheels /wheels
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /home/agent/megatron-stppo
COPY --chown=agent . .
# megatron-core without its extras: [dev] conflicts with vLLM's flashinfer.
RUN pip install --no-cache-dir /wheels/*.whl && pip install --no-cache-dir --no-deps megatron-core==0.16.1 \
    && pip install --no-cache-dir --no-build-isolation --editable ".[quickstart]" \
    && rm -rf /wheels && mkdir -p runs && chown -R agent /home/agent
USER agent
ENTRYPOINT ["megatron-stppo"]
CMD ["doctor"]
