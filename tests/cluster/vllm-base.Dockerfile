# What a vLLM server for CPUs needs beside its mounted venv: the compiler and headers that its code generator calls.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends g++ libgomp1 libnuma1 python3-dev \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
