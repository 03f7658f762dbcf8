"""`python -m omnistage.host.healthcheck ADDRESS` exits with 0 if the server there says SERVING. For container health checks."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omnistage.wire.channel import Credentials

TIMEOUT_S = 3.0


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m omnistage.host.healthcheck HOST:PORT", file=sys.stderr)
        return 2
    with Credentials().blocking_channel(sys.argv[1], [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            print(error, file=sys.stderr)
            return 1
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
