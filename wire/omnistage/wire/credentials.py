"""How a process connects to others and listens for them.

A process makes one `Credentials` when it reads its settings, and hands it to all code that makes a channel or listens. Connections are not
encrypted now. Encryption would be another class with these methods, and the code that uses this class would stay the same.
"""

from __future__ import annotations

import grpc.aio

from omnistage.wire.channel import Options


class Credentials:
    """Credentials of a process whose connections are not encrypted."""

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """An unconnected channel to HOST:PORT or to any other gRPC target, for the event loop that runs now."""
        return grpc.aio.insecure_channel(address, options=options)

    def blocking_channel(self, address: str, options: Options) -> grpc.Channel:
        """As `channel`, for a process without an event loop."""
        return grpc.insecure_channel(address, options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Have the server listen at HOST:PORT, before it starts. Returns its port, or 0 if it cannot listen there."""
        try:
            return server.add_insecure_port(address)
        except RuntimeError:
            return 0
