# Two targets: `operator` (small, no torch) and `worker`. The base must bring Python 3.11 to 3.13 with venv at /usr.
#   docker build --target worker -t headframe-worker .
#   docker build --target operator -t headframe-operator .
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
COPY constraints.txt /src/constraints.txt
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --quiet --no-cache-dir "$(grep -o '^uv==[0-9.]*' /src/constraints.txt)"
ENV UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy PATH=/opt/uv/bin:$PATH
WORKDIR /src

# The dependencies first: they are large and change rarely, so their layer is kept when only our code changes.
FROM build AS build-operator
COPY api/pyproject.toml /deps/api/pyproject.toml
COPY operator/pyproject.toml /deps/operator/pyproject.toml
RUN sed -i '/headframe-api==/d' /deps/operator/pyproject.toml \
 && python3 -m venv --without-pip /opt/headframe \
 && uv pip install --python /opt/headframe --quiet -c constraints.txt -r /deps/api/pyproject.toml -r /deps/operator/pyproject.toml
COPY api api
COPY operator operator
RUN uv pip install --python /opt/headframe --quiet -c constraints.txt ./api ./operator

FROM build AS build-worker
COPY api/pyproject.toml /deps/api/pyproject.toml
COPY worker/pyproject.toml /deps/worker/pyproject.toml
RUN sed -i '/headframe-api==/d' /deps/worker/pyproject.toml \
 && python3 -m venv --without-pip /opt/headframe \
 && uv pip install --python /opt/headframe --quiet -c constraints.txt --extra cuda -r /deps/api/pyproject.toml -r /deps/worker/pyproject.toml
COPY api api
COPY worker worker
RUN uv pip install --python /opt/headframe --quiet -c constraints.txt ./api ./worker

FROM ${BASE} AS runtime
LABEL org.opencontainers.image.title="headframe" \
      org.opencontainers.image.description="Lift hidden states out of language models" \
      org.opencontainers.image.licenses="Apache-2.0"
# A read-only root is enough: what a process writes goes to the volumes at /scratch, /cache and /tmp.
ENV PATH=/opt/headframe/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 65532:65532

FROM runtime AS operator
COPY --from=build-operator /opt/headframe /opt/headframe
ENTRYPOINT ["headframe-operator"]

FROM runtime AS worker
COPY --from=build-worker /opt/headframe /opt/headframe
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
EXPOSE 8080
ENTRYPOINT ["headframe"]
