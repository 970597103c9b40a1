# Two images: `operator` (small, no torch) and `worker`. BASE must have Python 3.11 to 3.13 with venv; COMPILER, of which
# nothing stays, the same Python with its headers and gcc.
#   docker build --target operator -t headframe-operator .
#   docker build --target worker -t headframe-worker .
# Dependencies lie in a layer of their own, below our code: they are large and change rarely.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
ARG COMPILER=docker.io/library/python:3.12-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY constraints.txt .
# The virtual environment holds the dependencies; a .pth file leads from it to our code.
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --quiet --no-cache-dir --constraint constraints.txt uv \
 && python3 -m venv --without-pip /opt/headframe \
 && for packages in /opt/headframe/lib/python3*/site-packages; do echo /opt/headframe-code >"$packages/headframe.pth"; done
ENV PATH=/opt/uv/bin:$PATH VIRTUAL_ENV=/opt/headframe UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy

FROM build AS operator-dependencies
COPY api/pyproject.toml /dependencies/api/pyproject.toml
COPY operator/pyproject.toml /dependencies/operator/pyproject.toml
RUN sed -i '/headframe-api==/d' /dependencies/operator/pyproject.toml \
 && uv pip install --quiet -c constraints.txt -r /dependencies/api/pyproject.toml -r /dependencies/operator/pyproject.toml \
 && find /opt/headframe -path '*/kubernetes/*client/*/__pycache__/*' -delete
# The last command: the client's classes for every API are never loaded, and compiled they take 40 MB.

FROM build AS operator-code
COPY api api
COPY operator operator
RUN uv pip install --quiet --no-deps -b constraints.txt --target /opt/headframe-code ./api ./operator

FROM build AS worker-dependencies
COPY api/pyproject.toml /dependencies/api/pyproject.toml
COPY worker/pyproject.toml /dependencies/worker/pyproject.toml
RUN sed -i '/headframe-api==/d' /dependencies/worker/pyproject.toml \
 && uv pip install --quiet -c constraints.txt --extra cuda -r /dependencies/api/pyproject.toml -r /dependencies/worker/pyproject.toml

FROM build AS worker-code
COPY api api
COPY worker worker
RUN uv pip install --quiet --no-deps -b constraints.txt --target /opt/headframe-code ./api ./worker

# Triton compiles one C file, its driver module, when the first kernel runs. It is compiled here instead, against a
# stand-in for the driver's library, so that the worker's image needs no compiler: see worker/image/prebuilt-cc.
FROM ${COMPILER} AS triton-driver
COPY --from=worker-dependencies /opt/headframe/pyvenv.cfg /triton/
COPY --from=worker-dependencies /opt/headframe/lib/python3*/site-packages/triton/backends/nvidia/driver.c /triton/
COPY --from=worker-dependencies /opt/headframe/lib/python3*/site-packages/triton/backends/nvidia/include /triton/include/
RUN grep -q "^version = $(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')[.]" /triton/pyvenv.cfg \
 || { echo "COMPILER must have the same Python as BASE" >&2; exit 1; }
RUN echo >/triton/stand-in.c \
 && gcc -shared -Wl,-soname,libcuda.so.1 -o /triton/libcuda.so.1 /triton/stand-in.c \
 && gcc /triton/driver.c -O3 -shared -fPIC -Wno-psabi -o /triton/driver.so -L/triton -l:libcuda.so.1 -I/triton/include \
      -I"$(python3 -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')"

FROM ${BASE} AS runtime
ARG BASE
LABEL org.opencontainers.image.description="Lifts hidden states out of language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The Headframe authors" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.base.name="${BASE}"
# A read-only root is enough: what a process writes goes to the volumes at /tmp and /cache. The user has no entry in
# /etc/passwd, so LOGNAME names it where a library asks.
ENV PATH=/opt/headframe-code/bin:/opt/headframe/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080

FROM runtime AS operator
LABEL org.opencontainers.image.title="headframe-operator"
COPY --from=operator-dependencies /opt/headframe /opt/headframe
COPY --from=operator-code /opt/headframe-code /opt/headframe-code
ENV LOGNAME=headframe
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["headframe-operator"]

FROM runtime AS worker
LABEL org.opencontainers.image.title="headframe-worker"
COPY --from=worker-dependencies /opt/headframe /opt/headframe
COPY --from=triton-driver /triton/driver.so /opt/triton/driver.so
COPY --chmod=0755 worker/image/prebuilt-cc /opt/triton/prebuilt-cc
COPY --from=worker-code /opt/headframe-code /opt/headframe-code
ENV CC=/opt/triton/prebuilt-cc LOGNAME=headframe \
    HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["headframe"]
