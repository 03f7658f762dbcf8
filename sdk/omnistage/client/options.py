"""The options of a single call."""

# No postponed annotations here, because the docstrings of methods are made from the descriptions in these annotations.
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from omnistage.client.about import About, Range
from omnistage.client.media_like import ImageLike

PIPELINE = "the pipeline's"
MODEL = "the model's"
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "video/webm", "video/mp4", 'video/mp4; codecs="avc1"')


class Options(TypedDict, total=False):
    """The options of a single call. An absent option has the pipeline's default; if the pipeline has none, the default that is described
    here.

    `help(Omni.generate)` and docs/client.md explain each of them."""

    pipeline: Annotated[str, About("Pipeline name, from `pipelines()`.", "the router's choice")]
    outputs: Annotated[
        Sequence[str],
        About(
            "Names of the outputs: text, audio, image, video; also alignment, latents, pixels, if a pipeline gives them on request.",
            "all but those on request; draw, film and sound ask for one alone",
        ),
    ]
    seed: Annotated[
        int,
        About(
            "The same seed gives the same answer; `Answer.seed` tells which seed was used. Without a temperature above 0 the text does not"
            " depend on chance, and every seed gives the same; `Answer.drew` tells whether another seed could have given another answer.",
            "random",
            Range(0, 2**64 - 1),
        ),
    ]
    conversation_id: Annotated[
        str, About("Turns of one conversation share it, for warm prefixes; at most 64 characters of A-Z a-z 0-9 _ -.", "none")
    ]
    request_id: Annotated[
        str,
        About(
            "Name of this request, at most 64 characters of A-Z a-z 0-9 _ -. A second request with the same name ends the answer that still"
            " runs for the first.",
            "one of its own",
        ),
    ]
    timeout_s: Annotated[float, About("Time limit of the whole call, seconds.", "120", Range(0, is_above=True))]
    max_retries: Annotated[
        int,
        About(
            "How often to ask again, within the time limit, if an error may pass and you have nothing of the answer yet.",
            "the client's, 2",
            Range(0),
        ),
    ]

    background: Annotated[
        str,
        About(
            "Colour under the transparent parts of pictures and films that are sent, as #rrggbb, in hexadecimal.",
            "white; a model of layers sees transparent parts",
        ),
    ]

    max_tokens: Annotated[int, About("The most tokens of the answer.", PIPELINE, Range(1, 32768))]
    min_tokens: Annotated[int, About("The fewest tokens of the answer; no more than max_tokens.", "0", Range(0, 32768))]
    stop: Annotated[str | Sequence[str], About("The text ends before any of these; at most 16, of 1 to 256 characters.", "none")]
    ignore_eos: Annotated[bool, About("Go on after the end-of-text token.", "False")]
    json_schema: Annotated[
        str | Mapping[str, Any], About("The text is JSON that keeps to this schema, given as JSON or as a dict.", "none")
    ]
    regex: Annotated[str, About("The whole text keeps to this regular expression.", "none")]
    choice: Annotated[Sequence[str], About("The text is one of these; at most 1024.", "none")]
    logprobs: Annotated[bool, About("Report how likely each token was: `TextDelta.logprobs`, `Answer.logprobs`.", "False")]
    top_logprobs: Annotated[int, About("How many of the likeliest tokens to report too, in `TextDelta.top_logprobs`.", "0", Range(0, 20))]
    temperature: Annotated[float, About("How freely tokens are drawn; 0 takes the likeliest.", PIPELINE, Range(0, 2))]
    top_k: Annotated[int, About("Draw from this number of the likeliest tokens; 0 is off.", PIPELINE, Range(0))]
    top_p: Annotated[
        float, About("Draw from the likeliest tokens that together have this probability; 1 is off.", PIPELINE, Range(0, 1, is_above=True))
    ]
    min_p: Annotated[
        float,
        About(
            "Draw from tokens with at least this part of the probability of the likeliest; 0 is off.", PIPELINE, Range(0, 1, is_below=True)
        ),
    ]
    repetition_penalty: Annotated[
        float, About("Above 1, tokens that were there before are less likely; 1 is off.", PIPELINE, Range(0, 100, is_above=True))
    ]
    presence_penalty: Annotated[
        float, About("Subtracted once from the logit of each token that was made before; 0 is off.", PIPELINE, Range(-2, 2))
    ]
    frequency_penalty: Annotated[
        float, About("Subtracted from the logit of a token for each time that it was made; 0 is off.", PIPELINE, Range(-2, 2))
    ]

    voice: Annotated[str, About("Voice name, from `pipelines()`.", MODEL)]
    speed: Annotated[float, About("Speed of speech.", "1", Range(0.5, 2))]
    markdown: Annotated[
        bool,
        About("Whether a text that is spoken unchanged is Markdown, and its marks are not read. What a model writes always is.", "False"),
    ]
    max_frames: Annotated[int, About("The most frames of speech; the model decides how many a second has.", PIPELINE, Range(1, 1 << 20))]

    profile: Annotated[str, About("How sound is cut into chunks.", "balanced", ("latency", "balanced", "quality", "offline"))]
    sample_rate_hz: Annotated[
        int,
        About(
            "Sample rate of the sound, or the model's own.",
            MODEL,
            ("8000", "11025", "12000", "16000", "22050", "24000", "32000", "44100", "48000"),
        ),
    ]
    encoding: Annotated[str, About("The form of the samples.", "pcm16", ("pcm16", "float32"))]

    negative_prompt: Annotated[str, About("Words for things that the picture must not show.", "none")]
    width: Annotated[int, About("Pixels.", MODEL, Range(1, 16384))]
    height: Annotated[int, About("Pixels.", MODEL, Range(1, 16384))]
    steps: Annotated[int, About("Denoising steps.", MODEL, Range(1, 1000))]
    guidance_scale: Annotated[float, About("How closely to follow the prompt.", MODEL, Range(0, 100))]
    results: Annotated[int, About("How many pictures.", "1", Range(1, 8))]
    previews: Annotated[int, About("How many previews come during the drawing, of the first result alone.", "0", Range(0, 16))]
    preview_side: Annotated[int, About("Longest side of a preview, pixels.", MODEL, Range(1, 1024))]
    step_cache: Annotated[
        float,
        About(
            "How much the first block may change in a step (1 is all of it) for the step to reuse what the other blocks added before:"
            " faster, but another picture. 0 is off.",
            "0",
            Range(0, 1),
        ),
    ]
    sigmas: Annotated[
        Sequence[float],
        About(
            "Noise levels of the steps, in place of steps, as the pipeline takes them: at least 1e-6, each below the one before it, at most"
            " 1000 of them.",
            "the pipeline's, for the number of steps",
        ),
    ]
    strength: Annotated[
        float,
        About("How much of the given picture is drawn anew, if the pipeline has this option.", PIPELINE, Range(0, 1, is_above=True)),
    ]
    mask_image: Annotated[
        ImageLike,
        About("For a pipeline that fills in: a picture, as large as the other, that is white or transparent where to draw anew.", "none"),
    ]
    control_image: Annotated[
        ImageLike, About("For a pipeline with a ControlNet: a picture that guides the drawing, such as edges or depths.", "none")
    ]
    options: Annotated[
        Mapping[str, Any],
        About(
            "Options of the pipeline's own, by their names in diffusers, such as {'cfg_normalization': True}; at most 64.",
            MODEL,
        ),
    ]
    frames: Annotated[int, About("Frames of a film.", MODEL, Range(1, 1 << 16))]
    frames_per_second: Annotated[float, About("Frames a second of a film.", MODEL, Range(0.1, 120))]
    seconds: Annotated[float, About("Length of a sound, or of a film if frames are not given.", MODEL, Range(0, 3600, is_above=True))]
    begin_s: Annotated[float, About("The second at which the sound begins, if it is a part of a longer one.", "0", Range(0, 3600))]
    guidance_scale_2: Annotated[
        float, About("How closely to follow the prompt in the steps of a second transformer.", "guidance_scale", Range(0, 100))
    ]
    flow_shift: Annotated[float, About("How far the schedule is shifted to the side of more noise.", MODEL, Range(0, 100, is_above=True))]
    layers: Annotated[int, About("How many layers each picture has, for a model that draws layers.", MODEL, Range(0, 64))]
    media_type: Annotated[
        str,
        About("Type of the file, if the model makes it; a film in MP4 is VP9 unless avc1 asks for H.264.", MODEL, MEDIA_TYPES),
    ]


TOP = ("pipeline", "outputs", "seed", "conversation_id", "request_id")
MEDIA = ("background",)
"""Options for the pictures and films that are sent."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
THINKER = ("max_tokens", "min_tokens", "stop", "ignore_eos", "logprobs", "top_logprobs")
CONSTRAINTS = ("json_schema", "regex", "choice")
TALKER = ("voice", "speed", "markdown", "max_frames")
CODE2WAV = ("profile", "sample_rate_hz", "encoding")
DIFFUSION = (
    *("negative_prompt", "width", "height", "steps", "guidance_scale", "results", "previews", "preview_side", "step_cache"),
    *("frames", "frames_per_second", "seconds", "begin_s", "guidance_scale_2", "flow_shift"),
    *("sigmas", "strength", "mask_image", "control_image", "options", "layers", "media_type"),
)
GUIDES = ("mask_image", "control_image")
"""Options that are pictures."""

EVERY_CALL = (*TOP, "timeout_s", "max_retries")
SPOKEN = (*EVERY_CALL, *TALKER, *CODE2WAV)
"""Options for a text that is spoken unchanged."""
DRAWN = (*EVERY_CALL, *MEDIA, *DIFFUSION)


OPTIONS: Mapping[str, Any] = Options.__annotations__
"""All options, each with its description."""
