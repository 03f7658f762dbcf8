"""All connections and ports of a stack are made by the credentials of its processes. With credentials of TLS, which only tests have, a
chain answers, and whoever does not speak TLS hears nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest

from helpers.ask import ask
from helpers.chain import addresses_of, good
from helpers.servers import local_chain, local_router, omni_stub
from omnistage.v1 import omni_pb2
from omnistage.wire.channel import Credentials, Options

NAME = "stack.test"


class Encrypted(Credentials):
    """With one certificate for all, which is its own authority."""

    def __init__(self, folder: Path) -> None:
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
        subprocess.run([*command, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=60)
        self._server = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
        self._client = grpc.ssl_channel_credentials(certificate.read_bytes())

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, self._client, options=[*options, ("grpc.ssl_target_name_override", NAME)])

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return server.add_secure_port(address, self._server)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command, which makes the certificate, is not installed")
async def test_every_connection_and_every_port_of_a_stack_is_made_by_its_credentials(tmp_path: Path) -> None:
    encrypted = Encrypted(tmp_path)
    async with local_chain(credentials=encrypted) as stages, local_router(addresses_of(stages), credentials=encrypted) as router:
        async with omni_stub(router.address, encrypted) as stub:
            (await ask(stub, good())).check_toy(5, "good")
        for address in (router.address, stages["thinker"].address):
            async with omni_stub(address) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
