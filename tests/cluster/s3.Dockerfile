# SeaweedFS as an S3 server.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
COPY s3-requirements.txt /tmp/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=certificates \
    python3 -m venv /opt/venv \
 && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/venv/bin/pip install -q --no-cache-dir --no-compile --require-hashes -r /tmp/requirements.txt
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin
USER 65532:65532
ENTRYPOINT ["weed"]
