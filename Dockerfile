# splitppo with the pinned set for NVIDIA GPUs (requirements.txt: CUDA 13, Python 3.12). In a clone:
#   docker build --tag splitppo .
# The folder from which a container is started is /workspace inside: data, models and runs stay there. NCCL and vLLM
# need the host's shared memory (--ipc=host):
#   alias run='docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 \
#       --volume "$PWD:/workspace" --env HF_HOME=/workspace/models/hub splitppo'
#   run splitppo prepare gsm8k
#   run torchrun --nproc_per_node 2 -m splitppo.train --config gsm8k/qwen2.5_0.5b
# On a cluster: docs/clusters.md
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# Triton, torch.compile and vLLM compile kernels when they first run: that takes gcc, nvcc and Python's headers
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN python3 -m venv /venv

# the large layer: it changes only with the pins
COPY requirements.txt /source/
RUN pip install --no-cache-dir --requirement /source/requirements.txt

COPY pyproject.toml setup.py README.md LICENSE /source/
COPY splitppo /source/splitppo
COPY configs /source/configs
RUN pip install --no-cache-dir --no-deps /source

WORKDIR /workspace
CMD ["splitppo", "--help"]
