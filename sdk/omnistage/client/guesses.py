"""Guesses which option was meant by a keyword that does not exist: by its spelling, and by its meaning in other libraries."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

SAME = {
    "pipeline": ("model", "model_name", "model_id", "engine"),
    "outputs": ("modalities", "return_audio", "output_modalities"),
    "seed": ("random_seed", "manual_seed", "generator", "random_state"),
    "timeout_s": ("timeout", "request_timeout", "max_time", "deadline"),
    "max_tokens": ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_length", "num_predict", "n_predict", "max_token"),
    "min_tokens": ("min_new_tokens", "min_length"),
    "stop": ("stop_sequences", "stop_strings", "stop_words", "stop_token_ids", "stops"),
    "json_schema": ("response_format", "guided_json", "format", "schema", "output_schema", "json_mode", "response_schema", "grammar"),
    "regex": ("guided_regex", "pattern"),
    "choice": ("guided_choice", "choices"),
    "temperature": ("temp", "do_sample", "greedy"),
    "repetition_penalty": ("repeat_penalty",),
    "voice": ("speaker", "voice_id", "voice_name", "spk", "speaker_id"),
    "speed": ("rate", "speaking_rate", "length_scale"),
    "sample_rate_hz": ("sample_rate", "sampling_rate", "sr", "samplerate"),
    "steps": ("num_inference_steps", "num_steps", "inference_steps"),
    "guidance_scale": ("guidance", "cfg", "cfg_scale", "true_cfg_scale", "classifier_free_guidance"),
    "strength": ("denoising_strength", "image_strength", "denoise"),
    "mask_image": ("mask", "mask_url", "inpaint_mask"),
    "control_image": ("controlnet_image", "control", "conditioning_image"),
    "options": ("pipeline_options", "pipeline_kwargs"),
    "frames": ("num_frames", "n_frames", "video_length", "frame_count"),
    "frames_per_second": ("fps", "frame_rate", "framerate"),
    "seconds": ("duration", "duration_s", "seconds_total", "audio_end_in_s", "audio_length_in_s", "audio_duration"),
    "begin_s": ("seconds_start", "audio_start_in_s"),
    "guidance_scale_2": ("guidance_2", "cfg_2"),
    "flow_shift": ("shift", "time_shift"),
    "results": ("num_images", "num_images_per_prompt", "num_outputs", "count"),
    "negative_prompt": ("negative", "neg_prompt"),
    "media_type": ("output_format", "image_format"),
    "images": ("image", "image_url", "init_image", "picture", "pictures", "multi_modal_data"),
    "audios": ("audio", "sound", "sounds", "audio_url", "input_audio"),
    "videos": ("video", "film", "films", "video_url"),
}
"""Other libraries' names of each option."""

OF_CALLS: Mapping[str, str] = {
    **{other: f"here it is {name}" for name, others in SAME.items() for other in others},
    **dict.fromkeys(("n", "num_return_sequences", "best_of"), "results is how many pictures; for several answers ask several times"),
    **dict.fromkeys(("size", "image_size", "resolution"), "give width and height, in pixels"),
    **dict.fromkeys(
        ("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"), "no pipeline calls tools or functions: leave it out"
    ),
    **dict.fromkeys(("logit_bias", "num_beams", "typical_p", "top_a", "use_cache"), "it is not offered: leave it out"),
    **dict.fromkeys(
        ("system", "system_prompt", "system_message", "instructions"),
        "give chat a first turn that says it: {'role': 'system', 'content': ...}",
    ),
    **dict.fromkeys(("messages", "history", "conversation"), "chat takes a conversation, as its first argument"),
    **dict.fromkeys(
        ("stream", "streaming"), "stream, stream_chat, stream_say, stream_draw, stream_film and stream_sound give events as they come"
    ),
    **dict.fromkeys(
        ("sampling_params", "generation_config", "params", "extra_body", "extra_args"),
        "give each as an argument of its own, such as temperature=0.7",
    ),
    **dict.fromkeys(("retries", "max_retry", "num_retries", "retry", "max_attempts"), "here it is max_retries"),
    **dict.fromkeys(("language", "lang", "language_code", "locale"), "the voice says which language is spoken: leave it out"),
    **dict.fromkeys(("pitch", "emotion", "style"), "no voice is changed so: leave it out; speed is how fast it speaks"),
    **dict.fromkeys(("quality",), "it is not offered: leave it out; steps makes a picture better"),
    **dict.fromkeys(("aspect_ratio", "ratio"), "give width and height, in pixels"),
    "use_audio_in_video": "give videos=[Video(path, use_audio=True)]",
    **dict.fromkeys(
        ("text", "message", "prompts", "texts", "input", "inputs", "question", "content", "query"),
        "the text is the first argument, without a name: generate('...'), say('...'); a list of texts for several answers",
    ),
    "alignment": "outputs names it: outputs=['text', 'audio', 'alignment']",
    "user": "api_key of Omni says who asks",
    **dict.fromkeys(("base_url", "api_base", "url", "host"), "Omni(address='HOST:PORT') names a router"),
    **dict.fromkeys(
        ("images", "audios", "videos"), "generate takes it; in chat a turn has it: {'role': 'user', 'content': ..., 'images': [...]}"
    ),
}
"""Advice for keywords that no call takes, or only some calls."""

_FORMS = ("response_format", "format", "output_format", "audio_format", "file_format")
_NO_TEXT = "no text is made here: leave it out"
_TEXT = "the text is the first argument, without a name"
_TEXTS = ("text", "prompt", "prompts", "message", "texts", "input", "inputs", "question", "content", "query")
_SYSTEM = ("system", "system_prompt", "system_message", "instructions")
_PICTURES = ("images", *SAME["images"])
_OF_TEXT = ("max_tokens", "min_tokens", "stop", "json_schema", "regex", "choice", "temperature", "repetition_penalty")

_DRAWN = {
    **{other: _NO_TEXT for name in _OF_TEXT for other in SAME[name]},
    **dict.fromkeys(_SYSTEM, "say it in the prompt"),
    **dict.fromkeys(_TEXTS, _TEXT),
}

OF_METHODS: Mapping[str, Mapping[str, str]] = {
    "generate": {},
    "say": {
        **{other: _NO_TEXT for name in _OF_TEXT for other in SAME[name]},
        **dict.fromkeys(_SYSTEM, "no voice is changed so: leave it out; speed is how fast it speaks"),
        **dict.fromkeys(_TEXTS, _TEXT),
        **dict.fromkeys(_FORMS, "the sound is saved by answer.save('x.mp3'), in the form that the name says"),
    },
    "draw": {**_DRAWN, **dict.fromkeys(_FORMS, "here it is media_type, such as 'image/png'")},
    "film": {
        **_DRAWN,
        **dict.fromkeys(_FORMS, "here it is media_type, such as 'video/mp4'"),
        **dict.fromkeys(_PICTURES, "here it is image, with which it begins"),
    },
    "sound": {
        **_DRAWN,
        **dict.fromkeys(_FORMS, "the sound is saved by answer.save('x.flac'), in the form that the name says"),
        **dict.fromkeys(_PICTURES, "no sound is made from pictures: leave it out"),
    },
}
"""Advice that depends on the called method, by method and keyword."""

_SOUNDS = ("mp3", "wav", "flac", "ogg", "opus", "aac", "pcm")
"""Values of `_FORMS` that mean a sound file in every call."""

OF_CLIENTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("model", "model_name", "model_id", "checkpoint", "model_dir", "pretrained_model_name_or_path", "path"),
        "model_path is a checkpoint, a folder or owner/name; pipeline is the name of a pipeline",
    ),
    **dict.fromkeys(
        ("base_url", "api_base", "url", "host", "port", "server", "endpoint", "target", "router"),
        "address='HOST:PORT' names a router",
    ),
    **dict.fromkeys(("key", "token", "api_token", "auth"), "here it is api_key"),
    **dict.fromkeys(("timeout", "request_timeout", "timeout_s"), "each call has timeout_s; here are start_timeout_s and connect_timeout_s"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel", "num_gpus", "gpus"), "here it is tensor_parallel_size"),
    **dict.fromkeys(("max_num_seqs", "max_concurrency", "max_concurrent_requests"), "here it is max_sessions"),
    **dict.fromkeys(("retries", "max_retry", "num_retries", "retry", "max_attempts"), "here it is max_retries"),
    "max_num_batched_tokens": "here it is max_batch_tokens",
    **dict.fromkeys(("device_map", "devices", "gpu"), "here it is device"),
    **dict.fromkeys(("torch_dtype", "precision"), "here it is dtype"),
    **dict.fromkeys(("num_threads", "cpu_threads"), "here it is threads"),
    **dict.fromkeys(("enable_prefix_caching", "prefix_caching", "use_cache"), "here it is enable_cache"),
    **dict.fromkeys(("max_model_len", "max_seq_len", "context_length", "n_ctx"), "kv_cache_bytes is the memory for contexts"),
    "trust_remote_code": "no code of a checkpoint is run: leave it out",
    **dict.fromkeys(("quantization", "load_in_8bit", "load_in_4bit"), "it is not offered: leave it out"),
    **dict.fromkeys(("organization", "project", "http_client", "default_headers"), "gRPC has no use for it: leave it out"),
}
"""Advice for keywords that `Omni` does not take."""


def near(name: str, names: Iterable[str]) -> str:
    """The known name whose spelling is most similar; empty: none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), 1)), "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that does not exist: the name that was probably meant; empty: none is similar."""
    similar = near(name, names)
    return f"; did you mean {similar}?" if similar else ""


def unknown_options(keywords: Mapping[str, object], options: Collection[str], settings: Collection[str], method: str) -> TypeError:
    """The error for keyword arguments that a call does not take. options: the options that calls take. settings: the keywords that `Omni`
    takes. method: one of `OF_METHODS`."""
    of_omni = {name: f"Omni takes it: Omni({name}=...)" for name in settings}
    sounds = {name: OF_METHODS["say"][name] for name in keywords if name in _FORMS and keywords[name] in _SOUNDS}
    return _refusal("a call takes no", keywords, options, {**of_omni, **OF_CALLS, **OF_METHODS[method], **sounds}, f"help(Omni.{method})")


def unknown_settings(keywords: Collection[str], settings: Collection[str], options: Collection[str]) -> TypeError:
    """The error for keyword arguments that `Omni` does not take. settings: those that it takes. options: those that a call takes."""
    of_calls = {name: f"each call takes it: omni.generate(prompt, {name}=...)" for name in options}
    of_calls |= {
        name: f"did you mean {similar} of a call, omni.generate(prompt, {similar}=...)?"
        for name in keywords
        if name not in OF_CLIENTS and (similar := _of_call(name, settings, options))
    }
    return _refusal("Omni takes no", keywords, settings, {**of_calls, **OF_CLIENTS}, "help(Omni)")


def _of_call(name: str, settings: Collection[str], options: Collection[str]) -> str:
    """The option of a call that was meant by a keyword of `Omni`; empty: none. The keyword is the option's name in another library, or is
    spelt more like this option than like any setting."""
    for option, others in SAME.items():
        if name in others and option in options:
            return option
    similar = near(name, [*settings, *options])
    return "" if similar in settings else similar


def _refusal(opening: str, names_refused: Collection[str], names: Collection[str], advice: Mapping[str, str], page: str) -> TypeError:
    """The error with advice for each name. opening: the text before each name. names: names that may have been misspelt. advice: advice by
    name. page: the call that shows help; the advice for a name that is similar to no other."""

    def guess(name: str) -> str:
        if name in advice:
            return advice[name]
        similar = near(name, names)
        return f"did you mean {similar}?" if similar else f"{page} tells what there is"

    return TypeError("; ".join(f"{opening} {name}: {guess(name)}" for name in sorted(names_refused)))
