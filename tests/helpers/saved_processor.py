"""A program that any version of Transformers can run: saves the folder of a Qwen2.5-Omni processor as that version does, and writes down
what it makes of conversations.

    python saved_processor.py SOURCE OUT

SOURCE: a folder in the published layout. OUT gets a folder for each of VARIANTS, and in it also EXPECTED: the settings of pictures that the
same version reads there again, and for each of CONVERSATIONS the ids of its prompt: an id, or an id and how often it stands there in a row.
Imports nothing of omnistage.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Conversation = list[dict[str, Any]]

EXPECTED = "expected.json"
CONVERSATIONS: list[Conversation] = [
    [{"role": "user", "parts": ["Hello, how are you?"]}],
    [{"role": "system", "parts": ["Answer in one word."]}, {"role": "user", "parts": ["  What\n\n is 12 + 30?\t你好 🙂 naïve café\r\n"]}],
    [
        {"role": "user", "parts": ["Who are you?"]},
        {"role": "assistant", "parts": ["A test."]},
        {"role": "user", "parts": ["Of ", "what", "?"]},
    ],
    [{"role": "user", "parts": [{"image": [60, 84]}, "What is this?"]}],
    [{"role": "user", "parts": ["One: ", {"image": [29, 431]}, " and two: ", {"image": [500, 300]}, {"image": [28, 31]}]}],
    [{"role": "user", "parts": [{"image": [1000, 1400]}]}],
    [{"role": "user", "parts": [{"audio": 16_000}, "What do you hear?", {"audio": 801}, {"audio": 123_457}]}],
    [{"role": "user", "parts": [{"video": [4, 112, 140]}, "What happens?"]}],
    [{"role": "user", "parts": [{"video": [8, 90, 200], "sound": 70_000}, "And here?"]}],
    [
        {"role": "system", "parts": ["You see and hear."]},
        {"role": "user", "parts": ["First ", {"image": [100, 100]}, {"audio": 20_000}]},
        {"role": "assistant", "parts": ["I see."]},
        {"role": "user", "parts": [{"audio": 5_000}, {"video": [6, 64, 64], "sound": 48_000}, {"image": [200, 90]}, "then?"]},
    ],
]
"""Parts are text, or a picture's height and width, samples of a sound, or frames of a film with their height and width and samples of its
sound."""

VARIANTS = ("published", "changed", "built")
"""The processor of SOURCE; the same with other limits and another template; and one put together of new parts."""

UNREADABLE = {("4.57", "built")}
"""The processors that a version saves and cannot read again: it writes the file of one part over that of another."""
HALF_READ = {("4.57", "changed")}
"""The processors that a version saves and reads for pictures alone, while 4.52 and 5 read them for films as well."""


def main(source: Path, out: Path) -> None:
    import transformers

    for variant in VARIANTS:
        if (transformers.__version__[:4], variant) in UNREADABLE:
            continue
        folder = out / variant
        folder.mkdir(parents=True)
        save(source, folder, variant)
        processor: Any = transformers.Qwen2_5OmniProcessor.from_pretrained(folder)
        pictures = processor.image_processor
        sizes = dict(pictures.size)
        expected = {
            "pixels": [sizes["shortest_edge"], sizes["longest_edge"]],
            "colours": [list(pictures.image_mean), list(pictures.image_std)],
            "prompts": [counted(ids(processor, conversation)) for conversation in CONVERSATIONS],
        }
        (folder / EXPECTED).write_text(json.dumps(expected))


def save(source: Path, folder: Path, variant: str) -> None:
    import transformers

    limits: dict[str, Any] = {} if variant == "published" else {"min_pixels": 20 * 28 * 28, "max_pixels": 150 * 28 * 28}
    processor: Any = transformers.Qwen2_5OmniProcessor.from_pretrained(source, **({} if variant == "built" else limits))
    if variant == "built":
        processor = type(processor)(
            image_processor=type(processor.image_processor)(**limits),
            video_processor=type(processor.video_processor)(),
            feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128, return_attention_mask=True),
            tokenizer=processor.tokenizer,
            chat_template=processor.chat_template,
        )
    if variant != "published":
        processor.chat_template = processor.chat_template.replace("You are a helpful assistant.", "You are helpful.")
    processor.save_pretrained(folder)
    transformers.Qwen2_5OmniConfig.from_pretrained(source).save_pretrained(folder)
    transformers.GenerationConfig.from_pretrained(source).save_pretrained(folder)


def ids(processor: Any, conversation: Conversation) -> list[int]:
    """The ids of a prompt, with media that are black and silent."""
    made = inputs(processor, conversation, blank)["input_ids"]
    return list(made[0] if isinstance(made[0], list) else made)


def blank(part: dict[str, Any], kind: str) -> NDArray[Any]:
    size = part[kind]
    return np.zeros(size if isinstance(size, int) else (*size, 3), np.float32)


def inputs(processor: Any, conversation: Conversation, medium: Callable[[dict[str, Any], str], NDArray[Any]], **options: Any) -> Any:
    """All that a processor makes of a conversation. medium: gives the pixels or samples of a part; its second argument is the part's key.
    options: go to the processor."""
    import transformers

    said = [{"role": turn["role"], "content": [content(part) for part in turn["parts"]]} for turn in conversation]
    text = processor.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    parts = [part for turn in conversation for part in turn["parts"] if not isinstance(part, str)]
    films, heard = [part for part in parts if "video" in part], [part for part in parts if "sound" in part or "audio" in part]
    media: dict[str, Any] = {
        "images": [medium(part, "image").astype(np.uint8) for part in parts if "image" in part],
        "videos": [medium(part, "video").astype(np.uint8) for part in films],
        "audio": [medium(part, "sound" if "sound" in part else "audio") for part in heard],
    }
    options |= {name: listed for name, listed in media.items() if listed}
    if any("sound" in part for part in films):
        if transformers.__version__.startswith("4."):
            options["use_audio_in_video"] = True
        else:
            options["load_audio_from_video"] = True
            options["audio_from_video_indices"] = [films.index(part) if "video" in part else None for part in heard]
    return processor(text=text, **options)


def content(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": next(kind for kind in ("image", "audio", "video") if kind in part)}


def counted(token_ids: list[int]) -> list[Any]:
    runs = [(int(token_id), len(list(same))) for token_id, same in itertools.groupby(token_ids)]
    return [token_id if count == 1 else [token_id, count] for token_id, count in runs]


def without_compiled_torchvision() -> None:
    """Let torchvision be imported beside a torch that it was not built for. Processors of films call nothing of it that is compiled; the
    module that is left out here is for what is."""
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")


if __name__ == "__main__":
    without_compiled_torchvision()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
