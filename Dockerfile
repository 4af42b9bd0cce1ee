# docker build -t kvway:0.1.0 .
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/kvway
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY policies policies
COPY sim sim
RUN /opt/kvway/bin/pip install --no-cache-dir --constraint constraints.txt '.[harmony,load,otel,report]'

FROM python:3.11.14-slim-bookworm
COPY --from=build /opt/kvway /opt/kvway
# Nothing is written but to /tmp: the root may be read-only.
ENV PATH=/opt/kvway/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8000 8001
ENTRYPOINT ["kvway"]
CMD ["serve", "--config", "/etc/kvway/kvway.yaml"]
