# syntax=docker/dockerfile:1
# Three targets. The steps live in scripts/, which CI runs too.
#   spec    TLC, the official release, on the model
#   check   everything that ./dev test checks
#   serve   vLLM's CUDA 13 image with kvledger
#
#   docker build --target spec --build-arg TLA2TOOLS_SHA256=… -t kvledger-spec .
#   docker build --target check -t kvledger-check .
#   docker build --target serve -t kvledger-serve .

FROM eclipse-temurin:21-jre-noble AS spec
ARG TLA2TOOLS_VERSION=1.7.4
ARG TLA2TOOLS_SHA256
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends curl python3 && rm -rf /var/lib/apt/lists/*
WORKDIR /kvledger
COPY scripts/ scripts/
RUN scripts/fetch-tlatools.sh "$TLA2TOOLS_VERSION" "$TLA2TOOLS_SHA256" /opt/tla2tools.jar
COPY spec/ spec/
COPY conformance/ conformance/
ENV TLA2TOOLS_JAR=/opt/tla2tools.jar
RUN python3 -m conformance.model

FROM python:3.12-slim-bookworm AS check
WORKDIR /kvledger
COPY . .
RUN ./dev test

FROM vllm/vllm-openai:v0.32.0 AS serve
WORKDIR /opt/kvledger
COPY pyproject.toml README.md LICENSE ./
COPY impl/ impl/
COPY scripts/serve.sh scripts/serve.sh
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[cuda13]'
ENTRYPOINT ["/opt/kvledger/scripts/serve.sh"]
