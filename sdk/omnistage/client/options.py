"""The options of a single call."""

# No postponed annotations here: the description beside each key is read when the docstrings of the methods that take it are made.
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
            "Ports wanted: text, audio, image, video; alignment, latents, pixels, where a pipeline gives them on request.",
            "all but those on request; of draw, film and sound that alone",
        ),
    ]
    seed: Annotated[
        int,
        About(
            "The same seed gives the same answer; `Answer.seed` tells which one was used. Without a temperature above 0 the text is not"
            " drawn, and every seed gives the same; `Answer.drew` tells whether another one could have given another answer.",
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
            "Name of this request, at most 64 characters of A-Z a-z 0-9 _ -. Asking again under the same name ends the answer that still"
            " runs under it.",
            "one of its own",
        ),
    ]
    timeout_s: Annotated[float, About("Time limit of the whole call, seconds.", "120", Range(0, is_above=True))]
    max_retries: Annotated[
        int,
        About(
            "How often to ask again, within the time limit, where the server says when to and you have nothing of the answer yet.",
            "the client's, 2",
            Range(0),
        ),
    ]

    background: Annotated[
        str,
        About(
            "Lies under what is transparent in pictures and films that are sent: a colour as #rrggbb, in hexadecimal.",
            "white; layers are drawn from what is transparent",
        ),
    ]

    max_tokens: Annotated[int, About("Tokens to make at most.", PIPELINE, Range(1, 32768))]
    min_tokens: Annotated[int, About("Tokens to make at least; no more than max_tokens.", "0", Range(0, 32768))]
    stop: Annotated[str | Sequence[str], About("The text ends before any of these; at most 16, of 1 to 256 characters.", "none")]
    ignore_eos: Annotated[bool, About("Go on after the end-of-text token.", "False")]
    json_schema: Annotated[
        str | Mapping[str, Any], About("The text is JSON that keeps to this schema, given as JSON or as a dict.", "none")
    ]
    regex: Annotated[str, About("The whole text keeps to this regular expression.", "none")]
    choice: Annotated[Sequence[str], About("The text is one of these; at most 1024.", "none")]
    logprobs: Annotated[bool, About("Also tell how likely each token was: `TextDelta.logprobs`, `Answer.logprobs`.", "False")]
    top_logprobs: Annotated[int, About("Those of so many of the likeliest tokens as well, in `TextDelta.top_logprobs`.", "0", Range(0, 20))]
    temperature: Annotated[float, About("How freely tokens are drawn; 0 takes the likeliest.", PIPELINE, Range(0, 2))]
    top_k: Annotated[int, About("Draw from so many of the likeliest tokens; 0 is off.", PIPELINE, Range(0))]
    top_p: Annotated[
        float, About("Draw from the likeliest tokens that together have this probability; 1 is off.", PIPELINE, Range(0, 1, is_above=True))
    ]
    min_p: Annotated[
        float, About("Draw from tokens that are at least so likely beside the likeliest; 0 is off.", PIPELINE, Range(0, 1, is_below=True))
    ]
    repetition_penalty: Annotated[
        float, About("Above 1, what was there before is less likely; 1 is off.", PIPELINE, Range(0, 100, is_above=True))
    ]
    presence_penalty: Annotated[float, About("Taken from the logit of a token that was made before; 0 is off.", PIPELINE, Range(-2, 2))]
    frequency_penalty: Annotated[float, About("The same for each time that it was made; 0 is off.", PIPELINE, Range(-2, 2))]

    voice: Annotated[str, About("Voice name, from `pipelines()`.", MODEL)]
    speed: Annotated[float, About("Speed of speech.", "1", Range(0.5, 2))]
    max_frames: Annotated[
        int, About("Frames of speech to make at most; how many a second has is the model's.", PIPELINE, Range(1, 1 << 20))
    ]

    profile: Annotated[str, About("How sound is cut into chunks.", "balanced", ("latency", "balanced", "quality", "offline"))]
    sample_rate_hz: Annotated[
        int,
        About(
            "Sample rate of the sound, or the model's own.",
            MODEL,
            ("8000", "11025", "12000", "16000", "22050", "24000", "32000", "44100", "48000"),
        ),
    ]
    encoding: Annotated[str, About("In what form samples come.", "pcm16", ("pcm16", "float32"))]

    negative_prompt: Annotated[str, About("What not to show.", "none")]
    width: Annotated[int, About("Pixels.", MODEL, Range(1, 16384))]
    height: Annotated[int, About("Pixels.", MODEL, Range(1, 16384))]
    steps: Annotated[int, About("Denoising steps.", MODEL, Range(1, 1000))]
    guidance_scale: Annotated[float, About("How closely to follow the prompt.", MODEL, Range(0, 100))]
    results: Annotated[int, About("How many pictures.", "1", Range(1, 8))]
    previews: Annotated[int, About("Previews on the way, of the first result alone.", "0", Range(0, 16))]
    preview_side: Annotated[int, About("Longest side of a preview, pixels.", MODEL, Range(1, 1024))]
    step_cache: Annotated[
        float,
        About(
            "How much the first block may change in a step, of 1, for the step to take over what the others added before: faster, and"
            " another picture. 0 is off.",
            "0",
            Range(0, 1),
        ),
    ]
    sigmas: Annotated[
        Sequence[float],
        About(
            "Noise levels of the steps as the pipeline takes them, from 1e-6 on, each below the one before it, at most 1000; instead of"
            " steps.",
            "the pipeline's, of so many steps",
        ),
    ]
    strength: Annotated[
        float,
        About("How much of the picture to start from is drawn anew, where the pipeline knows that.", PIPELINE, Range(0, 1, is_above=True)),
    ]
    mask_image: Annotated[
        ImageLike, About("Where to draw anew, of a pipeline that fills in: white or transparent there; as large as the picture.", "none")
    ]
    control_image: Annotated[
        ImageLike, About("What the picture keeps to, of a pipeline that has a ControlNet: such as edges or depths.", "none")
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
    seconds: Annotated[float, About("Of sound; of a film, where frames do not say how long it is.", MODEL, Range(0, 3600, is_above=True))]
    begin_s: Annotated[float, About("Seconds of a longer sound that come before what is made.", "0", Range(0, 3600))]
    guidance_scale_2: Annotated[float, About("The same where a second transformer takes over.", "guidance_scale", Range(0, 100))]
    flow_shift: Annotated[float, About("How far a schedule is shifted to its noise.", MODEL, Range(0, 100, is_above=True))]
    layers: Annotated[int, About("So many layers each, of a model that draws layers.", MODEL, Range(0, 64))]
    media_type: Annotated[
        str,
        About("Kind of file, as far as the model makes it; MP4 of a film is AV1 unless H.264 is asked for, as avc1.", MODEL, MEDIA_TYPES),
    ]


TOP = ("pipeline", "outputs", "seed", "conversation_id", "request_id")
MEDIA = ("background",)
"""Options for the pictures and films that are sent."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
THINKER = ("max_tokens", "min_tokens", "stop", "ignore_eos", "logprobs", "top_logprobs")
CONSTRAINTS = ("json_schema", "regex", "choice")
TALKER = ("voice", "speed", "max_frames")
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
"""Options for a text that is spoken as given."""
DRAWN = (*EVERY_CALL, *MEDIA, *DIFFUSION)


OPTIONS: Mapping[str, Any] = Options.__annotations__
"""All options, each with its description."""
