"""`python -m omnistage.diffusion`: a Diffusion server."""

from omnistage.host.startup import import_structlog, put_off_collection, tune_malloc

tune_malloc()  # Set before grpc is imported, which allocates large messages.
put_off_collection()
import_structlog()

import sys  # noqa: E402

from omnistage.diffusion.stage import DiffusionStage  # noqa: E402
from omnistage.stage.model import serve_kind  # noqa: E402

if __name__ == "__main__":
    sys.exit(serve_kind(DiffusionStage))
