# A server in a container:
#
#   docker build -t chairlift .                                # for a CPU; --build-arg VARIANT=gpu: for an NVIDIA GPU
#   docker run -p 8000:8000 -v chairlift:/cache chairlift      # the bundled model; then: serve path-or-hub-id ...
#
# docs/deploy.md says more.

# Debian keeps only the newest version of a package, so none is named.
# hadolint global ignore=DL3008

ARG DEBIAN=trixie
ARG VARIANT=cpu

FROM debian:${DEBIAN}-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/chairlift && python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir hatchling
WORKDIR /src
COPY constraints.txt ./
# The index of builds of torch; empty: the default one, whose builds for Linux are for NVIDIA GPUs and take gigabytes.
ARG VARIANT
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN if [ "$VARIANT" = gpu ]; then TORCH_INDEX=; fi \
    && /opt/chairlift/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
        "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY chairlift chairlift
# The wheel has compiled kernels, so that the image that runs needs no compiler: those of every instruction set, or of
# some by their names.
ARG KERNELS=all
RUN CHAIRLIFT_WHEEL_KERNELS="$KERNELS" /opt/build/bin/hatchling build --target wheel --directory /wheels \
    && /opt/chairlift/bin/pip install --no-cache-dir --constraint constraints.txt /wheels/*.whl

FROM debian:${DEBIAN}-slim AS base-cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*

# Triton compiles a few lines of C for each kernel that it launches.
FROM base-cpu AS base-gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM base-${VARIANT}
COPY --from=build /opt/chairlift /opt/chairlift
RUN useradd --uid 10001 --create-home chairlift && install --directory --owner=chairlift /cache
ENV PATH=/opt/chairlift/bin:$PATH \
    HF_HOME=/cache/huggingface \
    CHAIRLIFT_CACHE_DIR=/cache/chairlift \
    CHAIRLIFT_SERVE__HOST=0.0.0.0
# By its number: a cluster cannot tell whether a name is root's.
USER 10001
VOLUME /cache
EXPOSE 8000
# A model may take minutes to load. /health says 503 while the server drains, and when its engine hangs.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --start-interval=2s \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["chairlift"]
CMD ["serve"]
