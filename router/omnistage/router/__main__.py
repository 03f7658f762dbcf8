"""`python -m omnistage.router`: the router."""

from omnistage.host.startup import import_structlog, put_off_collection, tune_malloc

# Set before grpc is imported, because grpc allocates large messages. 16 arenas are as many as malloc makes on 2 cores: the memory of the
# router may be limited, and every arena maps 64 MiB.
tune_malloc(max_arenas=16)
put_off_collection()
import_structlog()

import sys  # noqa: E402

from omnistage.host.process import main  # noqa: E402
from omnistage.router.server import serve_router  # noqa: E402
from omnistage.router.settings import RouterSettings  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("omnistage.router", RouterSettings, serve_router))
