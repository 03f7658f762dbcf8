"""`python -m omnistage.gateway`: the gateway."""

from omnistage.host.startup import import_structlog, put_off_collection

put_off_collection()
import_structlog()

import sys  # noqa: E402

from omnistage.gateway.server import serve_gateway  # noqa: E402
from omnistage.gateway.settings import GatewaySettings  # noqa: E402
from omnistage.host.process import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("omnistage.gateway", GatewaySettings, serve_gateway))
