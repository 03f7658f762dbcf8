"""How a process connects to others and listens for them.

A process has one `Credentials`, made when its settings are read, and hands it to all that makes a channel or listens. Nothing is encrypted
now; encryption would be another class with these methods, and nobody who has one would change.
"""

from __future__ import annotations

import grpc.aio

from omnistage.wire.channel import Options


class Credentials:
    """Of a process whose connections are not encrypted."""

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """An unconnected channel to HOST:PORT or to any other gRPC target, for the event loop that runs now."""
        return grpc.aio.insecure_channel(address, options=options)

    def blocking_channel(self, address: str, options: Options) -> grpc.Channel:
        """The same for a process without an event loop."""
        return grpc.insecure_channel(address, options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Have the server listen at HOST:PORT, before it starts. The port that it has; 0: it cannot listen there."""
        try:
            return server.add_insecure_port(address)
        except RuntimeError:
            return 0
