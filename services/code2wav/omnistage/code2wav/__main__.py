"""`python -m omnistage.code2wav`: a server of that kind."""

from omnistage.host.memory import tune_malloc

tune_malloc()  # Before grpc is imported: it pays for large messages.

import sys  # noqa: E402

from omnistage.code2wav.stage import Code2WavStage  # noqa: E402
from omnistage.host.process import run  # noqa: E402
from omnistage.models.registry import LoadOptions, load_code2wav  # noqa: E402
from omnistage.stage.server import serve_stage  # noqa: E402
from omnistage.stage.settings import StageSettings  # noqa: E402


def load(settings: StageSettings) -> Code2WavStage:
    return Code2WavStage(load_code2wav(settings.model, LoadOptions.of(settings)))


if __name__ == "__main__":
    settings = StageSettings(_cli_parse_args=True)
    sys.exit(run(lambda: serve_stage("code2wav", settings, load)))
