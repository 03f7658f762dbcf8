"""Pictures as files, which contain the parameters that they were drawn from."""

from __future__ import annotations

import io
import json

from PIL import Image as pillow
from PIL import PngImagePlugin
from PIL.Image import Image

from omnistage.models.diffusers.plan import JPEG, PNG, WEBP, DrawingPlan

KEY = "parameters"
"""The keyword of a PNG's text chunk, under which people look for the parameters."""
DESCRIPTION = 0x010E
"""EXIF's ImageDescription, for the formats that have no such chunk."""
MOST_SAID = 60_000
"""The limit of bytes of the parameters in EXIF, all of them ASCII."""
SHORT = 2000
"""Characters that stay of a prompt that is too long: at most 12 bytes each."""
QUALITY = 92
FASTER = 4
"""zlib's level: at 6 a PNG takes twice as long and is hardly smaller."""


def parameters(plan: DrawingPlan, number: int, model: str, reused: int = 0, largest: float = 0.0) -> str:
    """The parameters of the picture with that number, as JSON: with them, and the pictures that it was drawn from, the same model draws it
    again. In the JSON, images are SHA-256 of files, and backgrounds are colours, empty for the usual. reused, largest: see Residuals."""
    backgrounds = [f"#{bytes(source.background).hex()}" if source.background else "" for source in plan.sources]
    fields = {
        "prompt": plan.prompt,
        "negative_prompt": plan.negative,
        "width": plan.width,
        "height": plan.height,
        "steps": plan.steps,
        "guidance_scale": plan.guidance,
        "seed": plan.seed_of(number),
        "layers": plan.layers,
        "images": [source.digest.hex() for source in plan.sources],
        "backgrounds": backgrounds if any(backgrounds) else [],
        "step_cache": plan.step_cache,
        "sigmas": plan.sigmas,
        "strength": plan.strength,
        "mask_image": plan.mask and plan.mask.digest.hex(),
        "control_image": plan.control and plan.control.digest.hex(),
        "options": dict(plan.options),
        "steps_reused": reused,
        "largest_change_reused": round(largest, 4),
        "model": model,
    }
    return json.dumps(
        {key: value for key, value in fields.items() if value not in (None, 0, [], (), {}) or key in ("seed", "guidance_scale")}
    )


def encode_picture(image: Image, media_type: str, parameter_text: str = "") -> bytes:
    """The bytes of a picture's file. JPEG has no transparency: transparent pixels become white. parameter_text: see `parameters`."""
    file = io.BytesIO()
    if media_type == PNG:
        text = PngImagePlugin.PngInfo()
        if parameter_text:
            text.add_itxt(KEY, parameter_text)
        image.save(file, "PNG", pnginfo=text, compress_level=FASTER)
        return file.getvalue()
    exif = pillow.Exif()
    if parameter_text:
        exif[DESCRIPTION] = _short(parameter_text)
    if media_type == JPEG:
        _opaque(image).save(file, "JPEG", quality=QUALITY, exif=exif)
    elif media_type == WEBP:
        image.save(file, "WEBP", quality=QUALITY, exif=exif)
    else:
        raise ValueError(f"no pictures of type {media_type!r}")
    return file.getvalue()


def _short(parameter_text: str) -> str:
    """The parameters (JSON), with the prompts cut short if the text would not fit into EXIF, which has 64 KiB."""
    if len(parameter_text) <= MOST_SAID:
        return parameter_text
    values = json.loads(parameter_text)
    words = {key: f"{values[key][:SHORT]}..." for key in ("prompt", "negative_prompt") if len(values.get(key, "")) > SHORT}
    return json.dumps({**values, **words})


def _opaque(image: Image) -> Image:
    """The picture in RGB, on white where it is transparent."""
    if image.mode != "RGBA":
        return image.convert("RGB")
    white = pillow.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white
