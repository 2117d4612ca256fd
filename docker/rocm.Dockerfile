# The suites on a host with AMD GPUs. docs/installing.md says how to build and to run this image.
# The base has torch 2.13.0 for ROCm in /opt/venv, which other indexes than AMD's do not have.
FROM rocm/pytorch:rocm10.0_ubuntu24.04_py3.12_pytorch_release_2.13.0

USER 0
# DeepSpeed compiles the optimizer that it offloads at its first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 gputrain \
    && install --directory --owner=gputrain /work

# The binding of amdsmi is that of this very ROCm: the base brings it, but does not install it.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/venv/lib/python3.12/site-packages/_rocm_sdk_core/share/amd_smi

WORKDIR /work
COPY --chown=gputrain . .
# The constraint is torch==2.13.0, which the torch of the base is; the last line fails if pip took another one all the same.
RUN pip install --no-cache-dir --constraint constraints.txt --editable '.[suite,report]' pytest-xdist==3.8.0 \
    && python -c "import torch; assert torch.version.hip, 'pip has replaced the torch of the base image'"

# Models are made from facts with random weights, so nothing asks a hub.
ENV HF_HUB_OFFLINE=1
USER 10001
CMD ["pytest", "benchmarks", "-m", "mi300x"]
