"""The options of a call that are fields of the contract. `python -m tools.options` makes this file from the protos."""

# No postponed annotations here, because the docstrings of methods are made from the descriptions in these annotations.
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from omnistage.client.about import About, ImageLike, Range


class FieldOptions(TypedDict, total=False):
    """A keyword for each field of the contract that people set by itself."""

    pipeline: Annotated[
        str,
        About(
            "Name of the pipeline, or of its checkpoint; `pipelines()` lists them.",
            "the router's choice",
            name="model",
            typed="--pipeline",
            other_names=["model", "model_name", "model_id", "engine"],
        ),
    ]
    """Name of the pipeline, or of its checkpoint; `pipelines()` lists them."""
    outputs: Annotated[
        Sequence[str],
        About(
            "Names of the outputs: text, audio, image, video; also alignment, latents, pixels, if a pipeline gives them on request.",
            "all but those on request; draw, film and sound ask for one alone",
            name="outputs",
            http={"chat": "modalities"},
            other_names=["modalities", "return_audio", "output_modalities"],
        ),
    ]
    """Names of the outputs: text, audio, image, video; also alignment, latents, pixels, if a pipeline gives them on request."""
    seed: Annotated[
        int,
        About(
            "The same seed gives the same answer; `Answer.seed` tells which seed was used. Without a temperature above 0 the text does not depend on chance, and every seed gives the same; `Answer.drew` tells whether another seed could have given another answer.",
            "random",
            Range(0, 18446744073709551615),
            name="seed",
            typed="--seed",
            other_names=["random_seed", "manual_seed", "generator", "random_state"],
        ),
    ]
    """The same seed gives the same answer; `Answer.seed` tells which seed was used. Without a temperature above 0 the text does not depend on chance, and every seed gives the same; `Answer.drew` tells whether another seed could have given another answer."""
    conversation_id: Annotated[
        str,
        About(
            "Turns of one conversation share it, for warm prefixes; at most 64 characters of A-Z a-z 0-9 _ -.",
            "none",
            name="conversation_id",
        ),
    ]
    """Turns of one conversation share it, for warm prefixes; at most 64 characters of A-Z a-z 0-9 _ -."""
    request_id: Annotated[
        str,
        About(
            "Name of this request, at most 64 characters of A-Z a-z 0-9 _ -. A second request with the same name ends the answer that still runs for the first.",
            "one of its own",
            name="request_id",
        ),
    ]
    """Name of this request, at most 64 characters of A-Z a-z 0-9 _ -. A second request with the same name ends the answer that still runs for the first."""
    max_tokens: Annotated[
        int,
        About(
            "The most tokens of the answer.",
            "the pipeline's",
            Range(1, 32768),
            place="thinker",
            name="max_tokens",
            typed="--max-tokens",
            http={"responses": "max_output_tokens"},
            other_names=[
                "max_new_tokens",
                "max_completion_tokens",
                "max_output_tokens",
                "max_length",
                "num_predict",
                "n_predict",
                "max_token",
            ],
            never_zero=True,
        ),
    ]
    """The most tokens of the answer."""
    min_tokens: Annotated[
        int,
        About(
            "The fewest tokens of the answer; no more than max_tokens.",
            "0",
            Range(0, 32768),
            place="thinker",
            name="min_tokens",
            other_names=["min_new_tokens", "min_length"],
        ),
    ]
    """The fewest tokens of the answer; no more than max_tokens."""
    stop: Annotated[
        str | Sequence[str],
        About(
            "The text ends before any of these; at most 16, of 1 to 256 characters.",
            "none",
            place="thinker",
            name="stop",
            typed="--stop",
            other_names=["stop_sequences", "stop_strings", "stop_words", "stop_token_ids", "stops"],
            max_characters=256,
        ),
    ]
    """The text ends before any of these; at most 16, of 1 to 256 characters."""
    ignore_eos: Annotated[
        bool,
        About(
            "Go on after the end-of-text token.",
            "False",
            place="thinker",
            name="ignore_eos",
        ),
    ]
    """Go on after the end-of-text token."""
    logprobs: Annotated[
        bool,
        About(
            "Report how likely each token was: `TextDelta.logprobs`, `Answer.logprobs`.",
            "False",
            place="thinker",
            name="logprobs",
        ),
    ]
    """Report how likely each token was: `TextDelta.logprobs`, `Answer.logprobs`."""
    top_logprobs: Annotated[
        int,
        About(
            "How many of the likeliest tokens to report too, in `TextDelta.top_logprobs`.",
            "0",
            Range(0, 20),
            place="thinker",
            name="top_logprobs",
        ),
    ]
    """How many of the likeliest tokens to report too, in `TextDelta.top_logprobs`."""
    temperature: Annotated[
        float,
        About(
            "How freely tokens are drawn; 0 takes the likeliest.",
            "the pipeline's",
            Range(0.0, 2.0),
            place="thinker.sampling",
            name="temperature",
            typed="--temperature",
            other_names=["temp", "do_sample", "greedy"],
        ),
    ]
    """How freely tokens are drawn; 0 takes the likeliest."""
    top_k: Annotated[
        int,
        About(
            "Draw from this number of the likeliest tokens; 0 is off.",
            "the pipeline's",
            Range(0),
            place="thinker.sampling",
            name="top_k",
        ),
    ]
    """Draw from this number of the likeliest tokens; 0 is off."""
    top_p: Annotated[
        float,
        About(
            "Draw from the likeliest tokens that together have this probability; 1 is off.",
            "the pipeline's",
            Range(0.0, 1.0, is_above=True),
            place="thinker.sampling",
            name="top_p",
            typed="--top-p",
        ),
    ]
    """Draw from the likeliest tokens that together have this probability; 1 is off."""
    min_p: Annotated[
        float,
        About(
            "Draw from tokens with at least this part of the probability of the likeliest; 0 is off.",
            "the pipeline's",
            Range(0.0, 1.0, is_below=True),
            place="thinker.sampling",
            name="min_p",
        ),
    ]
    """Draw from tokens with at least this part of the probability of the likeliest; 0 is off."""
    repetition_penalty: Annotated[
        float,
        About(
            "Above 1, tokens that were there before are less likely; 1 is off.",
            "the pipeline's",
            Range(0.0, 100.0, is_above=True),
            place="thinker.sampling",
            name="repetition_penalty",
            other_names=["repeat_penalty"],
        ),
    ]
    """Above 1, tokens that were there before are less likely; 1 is off."""
    presence_penalty: Annotated[
        float,
        About(
            "Subtracted once from the logit of each token that was made before; 0 is off.",
            "the pipeline's",
            Range(-2.0, 2.0),
            place="thinker.sampling",
            name="presence_penalty",
        ),
    ]
    """Subtracted once from the logit of each token that was made before; 0 is off."""
    frequency_penalty: Annotated[
        float,
        About(
            "Subtracted from the logit of a token for each time that it was made; 0 is off.",
            "the pipeline's",
            Range(-2.0, 2.0),
            place="thinker.sampling",
            name="frequency_penalty",
        ),
    ]
    """Subtracted from the logit of a token for each time that it was made; 0 is off."""
    json_schema: Annotated[
        str | Mapping[str, Any],
        About(
            "The text is JSON that keeps to this schema, given as JSON or as a dict.",
            "none",
            place="thinker.constraint",
            name="json_schema",
            typed="--json-schema",
            http={"chat": "response_format", "responses": "text.format"},
            other_names=["response_format", "guided_json", "format", "schema", "output_schema", "json_mode", "response_schema", "grammar"],
        ),
    ]
    """The text is JSON that keeps to this schema, given as JSON or as a dict."""
    regex: Annotated[
        str,
        About(
            "The whole text keeps to this regular expression.",
            "none",
            place="thinker.constraint",
            name="regex",
            typed="--regex",
            other_names=["guided_regex", "pattern"],
        ),
    ]
    """The whole text keeps to this regular expression."""
    choice: Annotated[
        Sequence[str],
        About(
            "The text is one of these; at most 1024.",
            "none",
            place="thinker.constraint",
            name="choice",
            typed="--choice",
            other_names=["guided_choice", "choices"],
        ),
    ]
    """The text is one of these; at most 1024."""
    voice: Annotated[
        str,
        About(
            "Voice name, from `pipelines()`.",
            "the model's",
            place="talker",
            name="voice",
            typed="--voice",
            http={"chat": "audio.voice"},
            other_names=["speaker", "voice_id", "voice_name", "spk", "speaker_id"],
        ),
    ]
    """Voice name, from `pipelines()`."""
    speed: Annotated[
        float,
        About(
            "Speed of speech.",
            "1",
            Range(0.5, 2.0),
            place="talker",
            name="speed",
            typed="--speed",
            other_names=["rate", "speaking_rate", "length_scale"],
        ),
    ]
    """Speed of speech."""
    markdown: Annotated[
        bool,
        About(
            "Whether a text that is spoken unchanged is Markdown, and its marks are not read. The text of a model always is.",
            "False",
            place="talker",
            name="markdown",
        ),
    ]
    """Whether a text that is spoken unchanged is Markdown, and its marks are not read. The text of a model always is."""
    max_frames: Annotated[
        int,
        About(
            "The most frames of speech; the model decides how many a second has.",
            "the pipeline's",
            Range(1, 1048576),
            place="talker",
            name="max_frames",
            typed="--max-frames",
            never_zero=True,
        ),
    ]
    """The most frames of speech; the model decides how many a second has."""
    profile: Annotated[
        str,
        About(
            "How sound is cut into chunks.",
            "balanced",
            ("latency", "balanced", "quality", "offline"),
            place="code2wav",
            name="profile",
            typed="--profile",
        ),
    ]
    """How sound is cut into chunks."""
    sample_rate_hz: Annotated[
        int,
        About(
            "Sample rate of the sound, or the model's own.",
            "the model's",
            ("8000", "11025", "12000", "16000", "22050", "24000", "32000", "44100", "48000"),
            place="code2wav",
            name="sample_rate_hz",
            typed="--sample-rate",
            http={"chat": "audio.format"},
            other_names=["sample_rate", "sampling_rate", "sr", "samplerate"],
            never_zero=True,
        ),
    ]
    """Sample rate of the sound, or the model's own."""
    encoding: Annotated[
        str,
        About(
            "The form of the samples.",
            "pcm16",
            ("pcm16", "float32"),
            place="code2wav",
            name="encoding",
            typed="--encoding",
            http={"speech": "response_format"},
        ),
    ]
    """The form of the samples."""
    negative_prompt: Annotated[
        str,
        About(
            "Words for things that the picture must not show.",
            "none",
            place="diffusion",
            name="negative_prompt",
            typed="--negative",
            other_names=["negative", "neg_prompt"],
            makes=["image", "video", "audio"],
            max_characters=32000,
        ),
    ]
    """Words for things that the picture must not show."""
    width: Annotated[
        int,
        About(
            "Pixels.",
            "the model's",
            Range(1, 16384),
            place="diffusion",
            name="width",
            typed="--width",
            http={"images": "size", "videos": "size"},
            makes=["image", "video"],
            never_zero=True,
        ),
    ]
    """Pixels."""
    height: Annotated[
        int,
        About(
            "Pixels.",
            "the model's",
            Range(1, 16384),
            place="diffusion",
            name="height",
            typed="--height",
            http={"images": "size", "videos": "size"},
            makes=["image", "video"],
            never_zero=True,
        ),
    ]
    """Pixels."""
    steps: Annotated[
        int,
        About(
            "Denoising steps.",
            "the model's",
            Range(1, 1000),
            place="diffusion",
            name="steps",
            typed="--steps",
            other_names=["num_inference_steps", "num_steps", "inference_steps"],
            makes=["image", "video", "audio"],
            never_zero=True,
        ),
    ]
    """Denoising steps."""
    guidance_scale: Annotated[
        float,
        About(
            "How closely to follow the prompt.",
            "the model's",
            Range(0.0, 100.0),
            place="diffusion",
            name="guidance_scale",
            typed="--guidance",
            other_names=["guidance", "cfg", "cfg_scale", "true_cfg_scale", "classifier_free_guidance"],
            makes=["image", "video", "audio"],
        ),
    ]
    """How closely to follow the prompt."""
    results: Annotated[
        int,
        About(
            "How many pictures.",
            "1",
            Range(1, 8),
            place="diffusion",
            name="results",
            typed="--count",
            http={"images": "n"},
            other_names=["num_images", "num_images_per_prompt", "num_outputs", "count"],
            makes=["image"],
            never_zero=True,
        ),
    ]
    """How many pictures."""
    previews: Annotated[
        int,
        About(
            "How many previews come during the drawing, of the first result alone.",
            "0",
            Range(0, 16),
            place="diffusion",
            name="previews",
            typed="--previews",
            http={"images": "partial_images"},
            makes=["image"],
        ),
    ]
    """How many previews come during the drawing, of the first result alone."""
    preview_side: Annotated[
        int,
        About(
            "Longest side of a preview, pixels.",
            "the model's",
            Range(1, 1024),
            place="diffusion",
            name="preview_side",
            typed="--preview-side",
            http={"images": "partial_images"},
            makes=["image"],
            never_zero=True,
        ),
    ]
    """Longest side of a preview, pixels."""
    step_cache: Annotated[
        float,
        About(
            "How much the first block may change in a step (1 is all of it) for the step to reuse what the other blocks added before: faster, but another picture. 0 is off.",
            "0",
            Range(0.0, 1.0),
            place="diffusion",
            name="step_cache",
            typed="--step-cache",
            makes=["image", "video"],
        ),
    ]
    """How much the first block may change in a step (1 is all of it) for the step to reuse what the other blocks added before: faster, but another picture. 0 is off."""
    frames: Annotated[
        int,
        About(
            "Frames of a film.",
            "the model's",
            Range(1, 65536),
            place="diffusion",
            name="frames",
            typed="--frames",
            other_names=["num_frames", "n_frames", "video_length", "frame_count"],
            makes=["video"],
            never_zero=True,
        ),
    ]
    """Frames of a film."""
    frames_per_second: Annotated[
        float,
        About(
            "Frames a second of a film.",
            "the model's",
            Range(0.1, 120.0),
            place="diffusion",
            name="frames_per_second",
            typed="--fps",
            other_names=["fps", "frame_rate", "framerate"],
            makes=["video"],
            never_zero=True,
        ),
    ]
    """Frames a second of a film."""
    seconds: Annotated[
        float,
        About(
            "Length of a sound, or of a film if frames are not given.",
            "the model's",
            Range(0.0, 3600.0, is_above=True),
            place="diffusion",
            name="duration_s",
            typed="--seconds",
            other_names=["duration", "duration_s", "seconds_total", "audio_end_in_s", "audio_length_in_s", "audio_duration"],
            makes=["video", "audio"],
            never_zero=True,
        ),
    ]
    """Length of a sound, or of a film if frames are not given."""
    begin_s: Annotated[
        float,
        About(
            "The second at which the sound begins, if it is a part of a longer one.",
            "0",
            Range(0.0, 3600.0),
            place="diffusion",
            name="begin_s",
            typed="--begin",
            other_names=["seconds_start", "audio_start_in_s"],
            makes=["audio"],
        ),
    ]
    """The second at which the sound begins, if it is a part of a longer one."""
    guidance_scale_2: Annotated[
        float,
        About(
            "How closely to follow the prompt in the steps of a second transformer.",
            "guidance_scale",
            Range(0.0, 100.0),
            place="diffusion",
            name="guidance_scale_2",
            typed="--guidance-2",
            other_names=["guidance_2", "cfg_2"],
            makes=["video"],
        ),
    ]
    """How closely to follow the prompt in the steps of a second transformer."""
    flow_shift: Annotated[
        float,
        About(
            "How far the schedule is shifted to the side of more noise.",
            "the model's",
            Range(0.0, 100.0, is_above=True),
            place="diffusion",
            name="flow_shift",
            typed="--flow-shift",
            other_names=["shift", "time_shift"],
            makes=["video"],
            never_zero=True,
        ),
    ]
    """How far the schedule is shifted to the side of more noise."""
    sigmas: Annotated[
        Sequence[float],
        About(
            "Noise levels of the steps, in place of steps, as the pipeline takes them: at least 1e-6, each below the one before it, at most 1000 of them.",
            "the pipeline's, for the number of steps",
            place="diffusion",
            name="sigmas",
            typed="--sigmas",
            makes=["image", "video"],
        ),
    ]
    """Noise levels of the steps, in place of steps, as the pipeline takes them: at least 1e-6, each below the one before it, at most 1000 of them."""
    strength: Annotated[
        float,
        About(
            "How much of the given picture is drawn anew, if the pipeline has this option.",
            "the pipeline's",
            Range(0.0, 1.0, is_above=True),
            place="diffusion",
            name="strength",
            typed="--strength",
            other_names=["denoising_strength", "image_strength", "denoise"],
            makes=["image"],
        ),
    ]
    """How much of the given picture is drawn anew, if the pipeline has this option."""
    mask_image: Annotated[
        ImageLike,
        About(
            "For a pipeline that fills in: a picture, as large as the other, that is white or transparent where to draw anew.",
            "none",
            place="diffusion",
            name="mask_image",
            typed="--mask",
            http={"images": "mask"},
            other_names=["mask", "mask_url", "inpaint_mask"],
            makes=["image", "video"],
        ),
    ]
    """For a pipeline that fills in: a picture, as large as the other, that is white or transparent where to draw anew."""
    control_image: Annotated[
        ImageLike,
        About(
            "For a pipeline with a ControlNet: a picture that guides the drawing, such as edges or depths.",
            "none",
            place="diffusion",
            name="control_image",
            typed="--control",
            other_names=["controlnet_image", "control", "conditioning_image"],
            makes=["image", "video"],
        ),
    ]
    """For a pipeline with a ControlNet: a picture that guides the drawing, such as edges or depths."""
    options: Annotated[
        Mapping[str, Any],
        About(
            "Options of the pipeline's own, by their names in diffusers, such as {'cfg_normalization': True}; at most 64.",
            "the model's",
            place="diffusion",
            name="options",
            typed="--option",
            other_names=["pipeline_options", "pipeline_kwargs"],
            makes=["image", "video", "audio"],
        ),
    ]
    """Options of the pipeline's own, by their names in diffusers, such as {'cfg_normalization': True}; at most 64."""
    layers: Annotated[
        int,
        About(
            "How many layers each picture has, for a model that draws layers.",
            "the model's",
            Range(0, 64),
            place="diffusion",
            name="layers",
            typed="--layers",
            makes=["image"],
        ),
    ]
    """How many layers each picture has, for a model that draws layers."""
    media_type: Annotated[
        str,
        About(
            "Type of the file, if the model makes it; a film in MP4 is VP9 unless avc1 asks for H.264.",
            "the model's",
            ("image/png", "image/jpeg", "image/webp", "video/webm", "video/mp4", 'video/mp4; codecs="avc1"'),
            place="diffusion",
            name="media_type",
            typed="--out",
            http={"images": "output_format", "videos": "format"},
            other_names=["output_format", "image_format"],
        ),
    ]
    """Type of the file, if the model makes it; a film in MP4 is VP9 unless avc1 asks for H.264."""
