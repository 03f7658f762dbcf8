"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from omnistage.host.settings import ServerSettings

Words = Annotated[tuple[str, ...], NoDecode]
"""Words, comma-separated."""

Pairs = Annotated[dict[str, str], NoDecode]
"""NAME=NAME, comma-separated."""

SPEECH_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15")
PICTURE_MODELS = ("dall-e-2", "dall-e-3", "gpt-image-1", "gpt-image-1-mini", "gpt-image-1.5", "gpt-image-2")
FILM_MODELS = ("sora-2", "sora-2-pro", "sora-2-2025-10-06", "sora-2-2025-12-08", "sora-2-pro-2025-10-06")
VOICES = ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")

OPENAI_NAMES = {"model_names": dict.fromkeys((*SPEECH_MODELS, *PICTURE_MODELS, *FILM_MODELS), ""), "voice_names": dict.fromkeys(VOICES, "")}
"""Names that have a meaning by default, by their setting; an empty value: the router or the pipeline chooses."""

NO_NAME = "-"
"""The value that removes a name of OPENAI_NAMES."""


def _setting(default: Any, metavar: str, description: str, **limits: Any) -> Any:
    """A field. metavar: the form of its value, in the help. limits: of the value, as Field takes them."""
    return Field(default, description=description, json_schema_extra={"metavar": metavar}, **limits)


class GatewaySettings(ServerSettings):
    """The settings of the gateway."""

    router: str = _setting(
        "127.0.0.1:50050", "HOST:PORT,...", "the router that is asked; or several, comma-separated, of which the first that answers is"
    )
    port_tries: int = Field(1, ge=1, le=100, description="how many ports are tried, from that of --address on, where one is taken")
    allowed_hosts: Words = _setting(
        (), "HOST,...", "names by which it may be called; on loopback also those of this machine, elsewhere by all if none is named"
    )
    allowed_origins: Words = _setting(
        (), "ORIGIN,...", "pages of other hosts that may call it from a browser, such as https://app.example.com"
    )
    trusted_proxies: Words = _setting((), "HOST,...", "addresses of proxies whose X-Forwarded-For says who asks")
    gateway_token_file: str = _setting(
        "", "FILE", "file with the gateway's own token, where it has not the stack's; or the token itself in OMNISTAGE_GATEWAY_TOKEN"
    )
    media_hosts: Words = _setting(
        (), "HOST,...", "hosts from which media are fetched, by https, where a request names a URL; none: such a request is refused"
    )
    model_names: Pairs = _setting(
        OPENAI_NAMES["model_names"],
        "NAME=PIPELINE,...",
        "further names of models that clients send, and the pipeline of each; nothing: the router's choice; -: it is no name",
    )
    voice_names: Pairs = _setting(
        OPENAI_NAMES["voice_names"],
        "NAME=VOICE,...",
        "further names of voices that clients send, and the voice of each; nothing: the pipeline's default; -: it is no name",
    )

    video_folder: str = _setting(
        "",
        "DIR",
        "where films are kept that were asked for as jobs, and the jobs: those that wait and those that are finished are there"
        " again after a restart; empty: a temporary folder, which goes when the gateway ends",
    )
    video_kept: float = _setting(86_400.0, "SECONDS", "seconds after which a film is deleted, from its end on", gt=0, allow_inf_nan=False)
    video_bytes: int = _setting(8 << 30, "BYTES", "most bytes of all films that are kept; the oldest go for a new one", ge=1 << 20)
    video_jobs: int = Field(64, ge=1, le=900, description="most films that wait or are made; one client has at most 3/4 of them")
    video_runs: int = Field(2, ge=1, le=64, description="how many of these are made at once, as far as the router has places")

    @field_validator("allowed_hosts", "allowed_origins", "trusted_proxies", "media_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """The words of a comma-separated text."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("model_names", "voice_names", mode="before")
    @classmethod
    def _pairs(cls, value: object, info: ValidationInfo) -> object:
        """The names in OPENAI_NAMES, changed by the setting, a comma-separated text of NAME=VALUE, which may add names, change their
        meaning, or remove them."""
        if isinstance(value, str):
            pairs = [part.partition("=") for part in value.split(",") if part.strip()]
            value = {name.strip(): meaning.strip() for name, _, meaning in pairs}
        if not isinstance(value, dict):
            return value
        return {name: meaning for name, meaning in {**OPENAI_NAMES[str(info.field_name)], **value}.items() if meaning != NO_NAME}
