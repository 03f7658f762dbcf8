"""`python -m omnistage.code2wav`: a Code2Wav server."""

from omnistage.host.startup import import_structlog, put_off_collection, tune_malloc

tune_malloc()  # Set before grpc is imported, which allocates large messages.
put_off_collection()
import_structlog()

import sys  # noqa: E402

from omnistage.code2wav.stage import Code2WavStage  # noqa: E402
from omnistage.stage.model import serve_kind  # noqa: E402

if __name__ == "__main__":
    sys.exit(serve_kind(Code2WavStage))
