"""Asks a gateway as OpenAI is asked: prints the answer while it is spoken, has the question spoken, and, where a model draws, drawn.

pip install openai
python talk.py http://127.0.0.1:8000/v1 "A red circle on blue." [MODEL]
"""

import base64
import os
import sys
import wave
from pathlib import Path
from typing import Any

import openai


def main(url: str, question: str, model: str = "") -> None:
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "nobody"))
    # The outputs of each model stand beside OpenAI's own fields.
    gives: dict[str, Any] = {one.id: one.to_dict()["outputs"] for one in client.models.list()}
    chunks = client.chat.completions.create(
        model=model or next(name for name, outputs in gives.items() if "audio" in outputs),
        messages=[{"role": "user", "content": question}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        stream=True,
    )
    with wave.open("answer.wav", "wb") as file:
        file.setparams((1, 2, 24_000, 0, "NONE", ""))
        for chunk in chunks:
            sound = chunk.choices[0].delta.audio if chunk.choices else None
            if sound and sound.transcript:
                print(sound.transcript, end="", flush=True)
            if sound and sound.data:
                file.writeframes(base64.b64decode(sound.data))
    print()

    speech = client.audio.speech.create(model="tts-1", voice="alloy", input=question, response_format="wav")
    speech.write_to_file("speech.wav")

    if any("image" in outputs for outputs in gives.values()):
        pictures = client.images.generate(model="gpt-image-1", prompt=question).data or []
        Path("picture.png").write_bytes(base64.b64decode(pictures[0].b64_json or ""))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except openai.APIError as error:
        sys.exit(f"error: {error.code}: {error.message}")
