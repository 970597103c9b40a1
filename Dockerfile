# Two images: `operator` (small, no torch) and `worker`. BASE must have Python 3.11 to 3.13 with venv; COMPILER, of which
# nothing stays, the same Python with its headers and gcc. Both trust the certificates of BASE.
#   docker build --target operator -t headframe-operator .
#   docker build --target worker -t headframe-worker .
# Dependencies lie in a layer of their own, below our code: they are large and change rarely. They are installed where they
# stay, by a uv that is only mounted, so that they are written once.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
ARG COMPILER=docker.io/library/python:3.12-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY constraints.txt .
# The commands of our code name the interpreter of the environment in which they will run.
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --quiet --no-cache-dir --constraint constraints.txt uv \
 && python3 -m venv --without-pip /opt/headframe
ENV PATH=/opt/uv/bin:$PATH VIRTUAL_ENV=/opt/headframe UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_SYSTEM_CERTS=1

FROM build AS operator-code
COPY api api
COPY operator operator
RUN uv pip install --quiet --no-deps -b constraints.txt --target /opt/headframe-code ./api ./operator

FROM build AS worker-code
COPY api api
COPY worker worker
RUN uv pip install --quiet --no-deps -b constraints.txt --target /opt/headframe-code ./api ./worker

FROM ${BASE} AS runtime
ARG BASE
LABEL org.opencontainers.image.description="Lifts hidden states out of language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The Headframe authors" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.base.name="${BASE}"
# A read-only root is enough: what a process writes goes to the volumes at /tmp and /cache. The user has no entry in
# /etc/passwd, so LOGNAME names it where a library asks.
ENV PATH=/opt/headframe-code/bin:/opt/headframe/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp LOGNAME=headframe
EXPOSE 8080
# The virtual environment holds the dependencies; a .pth file leads from it to our code.
RUN python3 -m venv --without-pip /opt/headframe \
 && for packages in /opt/headframe/lib/python3*/site-packages; do echo /opt/headframe-code >"$packages/headframe.pth"; done
WORKDIR /opt/headframe/dependencies
COPY constraints.txt api/pyproject.toml ./

FROM runtime AS operator-dependencies
COPY operator/pyproject.toml operator/
RUN --mount=type=bind,from=build,source=/opt/uv,target=/opt/uv \
    sed -i '/headframe-api==/d' operator/pyproject.toml \
 && /opt/uv/bin/uv pip install --quiet --no-cache --system-certs --compile-bytecode --python /opt/headframe/bin/python \
      -c constraints.txt -r pyproject.toml -r operator/pyproject.toml \
 && find /opt/headframe -path '*/kubernetes/*client/*/__pycache__/*' -delete
# The last command: the client's classes for every API are never loaded, and compiled they take 40 MB.

FROM operator-dependencies AS operator
LABEL org.opencontainers.image.title="headframe-operator"
COPY --from=operator-code /opt/headframe-code /opt/headframe-code
USER 10001:10001
WORKDIR /tmp
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["headframe-operator"]

FROM runtime AS worker-dependencies
COPY worker/pyproject.toml worker/
RUN --mount=type=bind,from=build,source=/opt/uv,target=/opt/uv \
    sed -i '/headframe-api==/d' worker/pyproject.toml \
 && /opt/uv/bin/uv pip install --quiet --no-cache --system-certs --compile-bytecode --python /opt/headframe/bin/python \
      -c constraints.txt --extra cuda -r pyproject.toml -r worker/pyproject.toml

# Triton compiles one C file, its driver module, when the first kernel runs. It is compiled here instead, so that the
# worker's image needs no compiler: see worker/image/prebuilt-cc. A stand-in takes the place of the GPU driver's library;
# the module must name that as needed, for nobody else loads it where the module finds its functions.
FROM ${COMPILER} AS triton-driver
COPY --from=worker-dependencies /opt/headframe/pyvenv.cfg /triton/
COPY --from=worker-dependencies /opt/headframe/lib/python3*/site-packages/triton/backends/nvidia/driver.c /triton/
COPY --from=worker-dependencies /opt/headframe/lib/python3*/site-packages/triton/backends/nvidia/include /triton/include/
RUN grep -q "^version = $(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')[.]" /triton/pyvenv.cfg \
 || { echo "COMPILER must have the same Python as BASE" >&2; exit 1; }
RUN echo >/triton/stand-in.c \
 && gcc -shared -Wl,-soname,libcuda.so.1 -o /triton/libcuda.so.1 /triton/stand-in.c \
 && gcc /triton/driver.c -O3 -shared -fPIC -Wno-psabi -o /triton/driver.so -I/triton/include \
      -L/triton -Wl,--no-as-needed -l:libcuda.so.1 \
      -I"$(python3 -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')" \
 && readelf --dynamic /triton/driver.so >/triton/needs && grep -qF '[libcuda.so.1]' /triton/needs

FROM worker-dependencies AS worker
LABEL org.opencontainers.image.title="headframe-worker"
COPY --from=triton-driver /triton/driver.so /opt/triton/driver.so
COPY --chmod=0755 worker/image/prebuilt-cc /opt/triton/prebuilt-cc
COPY --from=worker-code /opt/headframe-code /opt/headframe-code
ENV CC=/opt/triton/prebuilt-cc HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
USER 10001:10001
WORKDIR /tmp
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["headframe"]
