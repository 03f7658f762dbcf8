"""`python -m omnistage.host.healthcheck ADDRESS` exits with 0 if the server there says SERVING. For container health checks, and for
`omnistage doctor`."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omnistage.wire.channel import Credentials

TIMEOUT_S = 3.0


def find_trouble(address: str) -> str:
    """The reason why the server at HOST:PORT does not serve; empty: it does. Takes TIMEOUT_S at most."""
    with Credentials().blocking_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return f"no answer within {TIMEOUT_S:g} s" if is_silent else f"{error.code().name}: {error.details()}"
    return "" if reply.status == health_pb2.HealthCheckResponse.SERVING else "it answers, and is not ready"


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m omnistage.host.healthcheck HOST:PORT", file=sys.stderr)
        return 2
    if trouble := find_trouble(sys.argv[1]):
        print(trouble, file=sys.stderr)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
