"""`python -m omnistage.code2wav`: a server of that kind."""

from omnistage.host.memory import tune_malloc

tune_malloc()  # Before grpc is imported: it pays for large messages.

import sys  # noqa: E402

from omnistage.code2wav.stage import Code2WavStage  # noqa: E402
from omnistage.models.errors import LoadError  # noqa: E402
from omnistage.models.registry import LoadOptions, load_code2wav  # noqa: E402
from omnistage.stage.server import main  # noqa: E402
from omnistage.stage.settings import StageSettings  # noqa: E402


def load(settings: StageSettings) -> Code2WavStage:
    return Code2WavStage(load_code2wav(settings.model, LoadOptions.of(settings)))


if __name__ == "__main__":
    sys.exit(main("code2wav", load, LoadError))
