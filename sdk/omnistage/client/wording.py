"""The words of errors and of the log.

An error is written in the words of the user's interface: Python here, a shell and a chat in `cli.wording`, HTTP in `gateway.failure`. It
has two texts. Its hint has places for names: "ask for less ({max_tokens})" is `max_tokens` in Python and `--max-tokens` in a shell;
`{pipeline=NAME}` is an option with its value. Its message comes from the code that found the fault, with the contract's names of fields.
In a message the field at its beginning and the names of options are replaced, but only names with an underscore: `seed` and `stop` are
English words too.

For a keyword that does not exist, the error guesses which option was meant: by its spelling, and by its meaning in other libraries."""

from __future__ import annotations

import difflib
import inspect
import logging
import mimetypes
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from os import PathLike, fspath
from typing import Any, TypeVar

from omnistage.client.about import takes
from omnistage.client.options import ABOUT, OF_CLIENT, OPTIONS, SETTINGS

OPTION_OF = {
    "thinker.messages": "messages",
    "thinker.verbatim": "verbatim",
    "diffusion.prompt": "prompt",
    "diffusion.images": "images",
    "code2wav.voice": "voice",
    **{f"{about.place}.{about.name}".removeprefix("."): name for name, about in ABOUT.items() if about.name},
}
"""The option that sets a field of the contract, or what else a caller calls it."""

_PLACE = re.compile(r"\{([a-z_0-9]+)(?:=([^{}]*))?\}")
"""A place in a hint: {NAME} or {NAME=VALUE}."""
_QUOTED = re.compile(r"""('[^']*'|"[^"]*")""")
_NAME = re.compile(r"(?<![\w./-])(?:[a-z0-9]+\.)*[a-z0-9]+(?:_[a-z0-9]+)+(?![\w/-]|\.\w)")
"""A name with an underscore in a message, with the names of stages before it if there are some: talker.max_frames."""


def rename_field(field: str, names: Mapping[str, str]) -> str:
    """The field as the caller writes it: `names` replaces the longest beginning of the field that is one of its keys."""
    for name in sorted(names, key=len, reverse=True):
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return names[name] + field[len(name) :]
    return field


@dataclass(frozen=True, slots=True)
class Wording:
    """Writes errors with the names that the users of one interface know. names: the local name of an option, a setting, or another {NAME}
    in a hint; a name that is absent here stays. with_value: returns an option and its value as a user types them."""

    names: Mapping[str, str]
    with_value: Callable[[str, str], str]

    def name_of(self, field: str) -> str:
        """The name of a field of the contract, or of an option."""
        return rename_field(rename_field(field, OPTION_OF), self.names)

    def hint(self, advice: str) -> str:
        """A hint with local names in place of each {NAME}; a {NAME} that is unknown stays."""

        def filled(place: re.Match[str]) -> str:
            name, value = place.groups()
            local_name = self.names.get(name, name if name in OPTIONS else None)
            if local_name is None:
                return place[0]
            return local_name if value is None else self.with_value(local_name, value)

        return _PLACE.sub(filled, advice)

    def message(self, message: str, fields: tuple[str, ...] = ()) -> str:
        """A message in local words. fields: the contract's names of the fields that it is about."""
        for field in fields:
            for spelling in (field, PYTHON.name_of(field)):
                if message.startswith(f"{spelling}:"):
                    message = self.name_of(field) + message[len(spelling) :]
                    break
        # The head is the field, which has its local name already.
        head, colon, rest = message.partition(": ") if fields else ("", "", message)
        pieces = _QUOTED.split(rest)  # Every second piece is a quoted text, which is somebody's own and stays.
        pieces[::2] = [_NAME.sub(lambda name: self.name_of(name[0]), piece) for piece in pieces[::2]]
        return f"{head}{colon}{''.join(pieces)}"


def of_launcher(message: str) -> str:
    """The launcher's message about settings in Python's names; the launcher writes settings as options of `omnistage serve`."""
    message = re.sub(r"--replicas (\w+)=(\d+)", r"replicas={'\1': \2}", message)
    names = {f"--{name.replace('_', '-')}": name for name in SETTINGS} | {"--checkpoint": "model_path"}
    return re.sub(r"--[a-z][a-z-]*[a-z]", lambda option: names.get(option[0], option[0]), message)


PYTHON = Wording(
    {
        "thinker.constraint": "json_schema, regex or choice",
        "pipelines": "`pipelines()`",
        "servers": "`replicas()`",
        "addresses": "address='HOST:PORT,HOST:PORT'",
        "more_places": "max_sessions=N or replicas={'talker': 2}",
        "anew": "make a new Omni",
        "output": "a stack of `omnistage serve --verbose` shows what its processes say",
        "keep_sound": "answer.save(path), or SoundFile",
        "text_alone": "outputs=['text']",
        "named_with": "pipeline='NAME' beside model_path",
        "own_stack": "Omni(model_path='DIR')",
        "start_timeout": "start_timeout_s",
        "address": "address",
    },
    lambda name, value: f"{name}={value!r}",
)


SYNONYMS: Mapping[str, Sequence[str]] = {
    **{name: about.other_names for name, about in ABOUT.items() if about.other_names},
    "timeout_s": ("timeout", "request_timeout", "max_time", "deadline"),
    "images": ("image", "image_url", "init_image", "picture", "pictures", "multi_modal_data"),
    "audios": ("audio", "sound", "sounds", "audio_url", "input_audio"),
    "videos": ("video", "film", "films", "video_url"),
}
"""Other libraries' names of each option."""

_SYSTEM = "system system_prompt system_message instructions"
_TEXTS = "text message prompts texts input inputs question content query"
_RETRIES = "retries max_retry num_retries retry max_attempts"


def _by_keyword(keywords: Mapping[str, str]) -> dict[str, str]:
    """The advice for each keyword. keywords: by advice, the keywords that get it, with spaces between them."""
    return {keyword: advice for advice, texts in keywords.items() for keyword in texts.split()}


OF_CALLS: Mapping[str, str] = _by_keyword(
    {
        **{f"here it is {name}": " ".join(others) for name, others in SYNONYMS.items()},
        "results is how many pictures; for several answers ask several times": "n num_return_sequences best_of",
        "give width and height, in pixels": "size image_size resolution aspect_ratio ratio",
        "no pipeline calls tools or functions: leave it out": "tools tool_choice functions function_call parallel_tool_calls",
        "it is not offered: leave it out": "logit_bias num_beams typical_p top_a use_cache",
        "give chat a first turn that says it: {'role': 'system', 'content': ...}": _SYSTEM,
        "chat takes a conversation, as its first argument": "messages history conversation",
        "stream, stream_chat, stream_say, stream_draw, stream_film and stream_sound give events as they come": "stream streaming",
        "give each as an argument of its own, such as temperature=0.7": ("sampling_params generation_config params extra_body extra_args"),
        "here it is max_retries": _RETRIES,
        "the voice says which language is spoken: leave it out": "language lang language_code locale",
        "no voice is changed so: leave it out; speed is how fast it speaks": "pitch emotion style",
        "it is not offered: leave it out; steps makes a picture better": "quality",
        "give videos=[Video(path, use_audio=True)]": "use_audio_in_video",
        "the text is the first argument, without a name: generate('...'), say('...'); a list of texts for several answers": _TEXTS,
        "outputs names it: outputs=['text', 'audio', 'alignment']": "alignment",
        "api_key of Omni says who asks": "user",
        "Omni(address='HOST:PORT') names a router": "base_url api_base url host",
        "generate takes it; in chat a turn has it: {'role': 'user', 'content': ..., 'images': [...]}": "images audios videos",
    }
)
"""Advice for keywords that no call takes, or only some calls."""

_FORMS = "response_format format output_format audio_format file_format"
_PICTURES = " ".join(("images", *SYNONYMS["images"]))
_OF_TEXT = ("max_tokens", "min_tokens", "stop", "json_schema", "regex", "choice", "temperature", "repetition_penalty")

_WITHOUT_TEXT = {
    "no text is made here: leave it out": " ".join(other for name in _OF_TEXT for other in SYNONYMS[name]),
    "the text is the first argument, without a name": f"{_TEXTS} prompt",
}
_DRAWING_ADVICE = {**_WITHOUT_TEXT, "say it in the prompt": _SYSTEM}
_ADVICE: Mapping[str, Mapping[str, str]] = {
    "generate": {},
    "say": {
        **_WITHOUT_TEXT,
        "no voice is changed so: leave it out; speed is how fast it speaks": _SYSTEM,
        "the sound is saved by answer.save('x.mp3'), in the form that the name says": _FORMS,
    },
    "draw": {**_DRAWING_ADVICE, "here it is media_type, such as 'image/png'": _FORMS},
    "film": {
        **_DRAWING_ADVICE,
        "here it is media_type, such as 'video/mp4'": _FORMS,
        "here it is image, with which it begins": _PICTURES,
    },
    "sound": {
        **_DRAWING_ADVICE,
        "the sound is saved by answer.save('x.flac'), in the form that the name says": _FORMS,
        "no sound is made from pictures: leave it out": _PICTURES,
    },
}

OF_METHODS: Mapping[str, Mapping[str, str]] = {method: _by_keyword(advice) for method, advice in _ADVICE.items()}
"""Advice that depends on the called method, by method and keyword."""

_SOUNDS = ("mp3", "wav", "flac", "ogg", "opus", "aac", "pcm")
"""Values of `_FORMS` that mean a sound file in every call."""

OF_CLIENTS: Mapping[str, str] = _by_keyword(
    {
        "model_path is a checkpoint, a folder or owner/name; pipeline is the name of a pipeline": (
            "model model_name model_id checkpoint model_dir pretrained_model_name_or_path path"
        ),
        "address='HOST:PORT' names a router": "base_url api_base url host port server endpoint target router",
        "here it is api_key": "key token api_token auth",
        "each call has timeout_s; here are start_timeout_s and connect_timeout_s": "timeout request_timeout timeout_s",
        "here it is tensor_parallel_size": "tp tp_size tensor_parallel num_gpus gpus",
        "here it is max_sessions": "max_num_seqs max_concurrency max_concurrent_requests",
        "here it is max_retries": _RETRIES,
        "here it is max_batch_tokens": "max_num_batched_tokens",
        "here it is device": "device_map devices gpu",
        "here it is dtype": "torch_dtype precision",
        "here it is threads": "num_threads cpu_threads",
        "here it is enable_cache": "enable_prefix_caching prefix_caching use_cache",
        "kv_cache_bytes is the memory for contexts": "max_model_len max_seq_len context_length n_ctx",
        "no code of a checkpoint is run: leave it out": "trust_remote_code",
        "it is not offered: leave it out": "quantization load_in_8bit load_in_4bit",
        "gRPC has no use for it: leave it out": "organization project http_client default_headers",
    }
)
"""Advice for keywords that `Omni` does not take."""


def find_similar(name: str, names: Iterable[str]) -> str:
    """The known name whose spelling is most similar; empty: none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), 1)), "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that does not exist: the name that was probably meant; empty: none is similar."""
    similar = find_similar(name, names)
    return f"; did you mean {similar}?" if similar else ""


def unknown_options(keywords: Mapping[str, object], options: Collection[str], settings: Collection[str], method: str) -> TypeError:
    """The error for keyword arguments that a call does not take. options: the options that calls take. settings: the keywords that `Omni`
    takes. method: one of `OF_METHODS`."""
    of_omni = {name: f"Omni takes it: Omni({name}=...)" for name in settings}
    sounds = {name: OF_METHODS["say"][name] for name in keywords if name in _FORMS.split() and keywords[name] in _SOUNDS}
    return _refusal("a call takes no", keywords, options, {**of_omni, **OF_CALLS, **OF_METHODS[method], **sounds}, f"help(Omni.{method})")


def unknown_settings(keywords: Collection[str], settings: Collection[str], options: Collection[str]) -> TypeError:
    """The error for keyword arguments that `Omni` does not take. settings: those that it takes. options: those that a call takes."""
    of_calls = {name: f"each call takes it: omni.generate(prompt, {name}=...)" for name in options}
    likely = {name: _of_call(name, settings, options) for name in keywords if name not in OF_CLIENTS}
    of_calls |= {name: f"did you mean {one} of a call, omni.generate(prompt, {one}=...)?" for name, one in likely.items() if one}
    return _refusal("Omni takes no", keywords, settings, {**of_calls, **OF_CLIENTS}, "help(Omni)")


def _of_call(name: str, settings: Collection[str], options: Collection[str]) -> str:
    """The option of a call that was meant by a keyword of `Omni`; empty: none. The keyword is the option's name in another library, or is
    spelt more like this option than like any setting."""
    for option, others in SYNONYMS.items():
        if name in others and option in options:
            return option
    similar = find_similar(name, [*settings, *options])
    return "" if similar in settings else similar


def _refusal(opening: str, keywords: Collection[str], names: Collection[str], advice: Mapping[str, str], help_call: str) -> TypeError:
    """The error for keywords that are not taken. opening: the text before each of them. names: the names that are taken, of which one may
    have been misspelt. advice: by keyword. help_call: the call that shows help; the error names it if there is no other advice."""

    def guess(name: str) -> str:
        if name in advice:
            return advice[name]
        similar = find_similar(name, names)
        return f"did you mean {similar}?" if similar else f"{help_call} tells what there is"

    return TypeError("; ".join(f"{opening} {name}: {guess(name)}" for name in sorted(keywords)))


F = TypeVar("F", bound=Callable[..., Any])

FIRST_ARGUMENTS = {"prompt": "'What is a kite?'", "text": "'Good morning.'", "conversation": "[{'role': 'user', 'content': 'Hello'}]"}
"""An example of each first argument, by its name."""


def explain_calls(method: F) -> F:
    """A decorator: a call that does not fit the method's signature raises TypeError, as Python's own calls do, with a text that shows how
    to write it. The signature stays the same."""
    signature = inspect.signature(method)

    def check(positionals: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        try:
            signature.bind(*positionals, **keywords)
        except TypeError:
            if refusal := _misfit(method.__name__, signature, positionals[1:], keywords):
                raise refusal from None

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def waited(*positionals: Any, **keywords: Any) -> Any:
            check(positionals, keywords)
            return await method(*positionals, **keywords)

        return waited  # type: ignore[return-value]

    @wraps(method)
    def called(*positionals: Any, **keywords: Any) -> Any:
        check(positionals, keywords)
        return method(*positionals, **keywords)

    return called  # type: ignore[return-value]


def takes_options(names: Collection[str] = OPTIONS) -> Callable[[F], F]:
    """A decorator for a method that takes options: `explain_calls`, and its docstring describes the options. names: of those that have an
    effect on this call."""

    def explained(method: F) -> F:
        return takes(OPTIONS, names)(explain_calls(method))

    return explained


def _misfit(name: str, signature: inspect.Signature, positionals: Sequence[Any], keywords: Mapping[str, Any]) -> TypeError | None:
    """The error for a call that does not fit the signature of the method `name`; None: the method itself raises a better error.
    positionals: the positional arguments without `self`. keywords: the keyword arguments."""
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    positional_names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    names = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    has_options = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if len(positionals) > len(positional_names):
        return TypeError(_surplus(name, positional_names, names, positionals))
    if name == "__init__":
        return None  # This method takes any keyword as a setting, and its own error names the unknown ones.
    known_names = {*names, *(OPTIONS if has_options else ())}
    unknown = {keyword: value for keyword, value in keywords.items() if keyword not in known_names}
    if unknown and has_options:
        kind = name.removeprefix("stream_")
        return unknown_options(unknown, OPTIONS, (*OF_CLIENT, *SETTINGS), kind if kind in OF_METHODS else "generate")
    if unknown:
        return TypeError("; ".join(f"{name} takes no {one}: {_guess(one, names)}" for one in unknown))
    first_name = positional_names[0]
    if positionals and first_name in keywords:
        return TypeError(f"{name} has its {first_name} twice: first, and by name; leave one of them out")
    example = f": {name}({FIRST_ARGUMENTS[first_name]})" if first_name in FIRST_ARGUMENTS else ""
    return TypeError(f"{name} needs its {first_name}, as the first argument{example}")


def _guess(name: str, names: Sequence[str]) -> str:
    """A hint for a keyword that does not exist: the keyword that was probably meant, or else all keywords of the call."""
    similar = next((one for one in names if name in SYNONYMS.get(one, ())), "") or find_similar(name, names)
    return f"did you mean {similar}?" if similar else f"it takes {', '.join(names)} alone"


def _surplus(name: str, positional_names: Sequence[str], names: Sequence[str], positionals: Sequence[Any]) -> str:
    """The error text for too many positional arguments. name: of the method. positional_names: the parameters that may be positional.
    names: the parameters that may be keywords."""
    if name == "__init__":
        # Omni("localhost", 50050) was meant as an address.
        address = f"{positionals[0]}:{positionals[1]}" if isinstance(positionals[1], int) else "HOST:PORT"
        return f"Omni takes only its pipeline without a name; give what else there is by name, such as Omni(address={address!r})"
    if not positional_names:
        return f"{name} takes no argument without a name; give it by name: {name}({names[0]}={_short_repr(positionals[0])})"
    if name == "as_client":
        return "as_client takes one argument, the key"
    first_name = positional_names[0]
    surplus = positionals[len(positional_names)]
    if name.endswith("chat"):
        advice = "a turn has its media: {'role': 'user', 'content': ..., 'images': [...]}"
    else:
        advice = f"give what else there is by name, such as {name}({first_name}, {_keyword(name, surplus)}={_short_repr(surplus)})"
    return f"{name} takes only its {first_name} without a name; {advice}"


def _keyword(name: str, value: object) -> str:
    """The keyword for which a second positional argument was probably meant, guessed from the type of its value. name: of the method."""
    if name.endswith("say"):
        return "voice" if isinstance(value, str) else "speed"
    of_drawings = {"draw": ("seed", "images"), "film": ("frames", "image"), "sound": ("seconds", "negative_prompt")}
    for_number, for_other = of_drawings.get(name.removeprefix("stream_"), ("max_tokens", ""))
    if isinstance(value, int | float):
        return for_number
    if for_other:
        return for_other
    first = value[0] if isinstance(value, list) and value else value
    kind = (mimetypes.guess_type(fspath(first))[0] or "") if isinstance(first, str | PathLike) else ""
    return next((f"{one}s" for one in ("audio", "video") if kind.startswith(one)), "images")


def _short_repr(value: object) -> str:
    """repr(value), or "..." if that has more than 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else "..."


def logger(name: str) -> logging.Logger:
    """The logger of a module; it escapes the texts among the arguments of its lines as `show_text` does."""
    log = logging.getLogger(name)
    log.addFilter(_escape_record)
    return log


def show_text(text: str) -> str:
    """The text with escapes for characters that control a terminal, end a line or cannot be seen."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _escape_record(record: logging.LogRecord) -> bool:
    """A filter that escapes the arguments of a record, and lets every record pass."""
    if isinstance(record.args, tuple):
        record.args = tuple(show_text(argument) if isinstance(argument, str) else argument for argument in record.args)
    return True
