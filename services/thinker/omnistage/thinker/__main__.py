"""`python -m omnistage.thinker`: a Thinker server."""

from omnistage.host.startup import import_structlog, put_off_collection, tune_malloc

tune_malloc()  # Set before grpc is imported, which allocates large messages.
put_off_collection()
import_structlog()

import sys  # noqa: E402

from omnistage.stage.model import serve_kind  # noqa: E402
from omnistage.thinker.stage import ThinkerStage  # noqa: E402

if __name__ == "__main__":
    sys.exit(serve_kind(ThinkerStage))
