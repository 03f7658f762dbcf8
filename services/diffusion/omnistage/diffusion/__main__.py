"""`python -m omnistage.diffusion`: a server of that kind."""

from omnistage.host.memory import tune_malloc

tune_malloc()  # Before grpc is imported: it pays for large messages.

import sys  # noqa: E402

from omnistage.diffusion.stage import DiffusionStage  # noqa: E402
from omnistage.models.errors import LoadError  # noqa: E402
from omnistage.models.registry import LoadOptions, load_diffusion  # noqa: E402
from omnistage.stage.server import main  # noqa: E402
from omnistage.stage.settings import StageSettings  # noqa: E402


def load(settings: StageSettings) -> DiffusionStage:
    return DiffusionStage(load_diffusion(settings.model, LoadOptions.of(settings)))


if __name__ == "__main__":
    sys.exit(main("diffusion", load, LoadError))
