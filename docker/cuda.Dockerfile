# The suites on a host with NVIDIA GPUs. docs/installing.md says how to build and to run this image.
FROM nvidia/cuda:13.0.3-devel-ubuntu24.04

# DeepSpeed compiles the optimizer that it offloads at its first use, with nvcc of this image, g++ and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 gputrain \
    && install --directory --owner=gputrain /work

# torch has a layer of its own, because it is several gigabytes and changes least.
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv && pip install --no-cache-dir torch==2.13.0

WORKDIR /work
COPY --chown=gputrain . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable '.[suite,report]' pytest-xdist==3.8.0 \
    && python -c "import torch; assert torch.version.cuda, 'this torch was built for no GPU'"

# Models are made from facts with random weights, so nothing asks a hub.
ENV HF_HUB_OFFLINE=1
USER 10001
CMD ["pytest", "benchmarks", "-m", "h100"]
