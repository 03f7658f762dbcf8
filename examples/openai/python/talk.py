"""Asks a gateway as OpenAI is asked: prints the answer while it is spoken, has the question spoken, and, where a model draws, drawn.

pip install openai
python talk.py http://127.0.0.1:8000/v1 "A red circle on blue." [MODEL]
"""

import base64
import os
import sys
import wave
from pathlib import Path

import openai


def main(url: str, question: str, model: str = "") -> None:
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "nobody"))
    models = [one.to_dict() for one in client.models.list()]
    chunks = client.chat.completions.create(
        model=model or next(one["id"] for one in models if "audio" in one["outputs"]),
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

    if any("image" in one["outputs"] for one in models):
        (picture,) = client.images.generate(model="gpt-image-1", prompt=question).data
        Path("picture.png").write_bytes(base64.b64decode(picture.b64_json))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except openai.APIError as error:
        sys.exit(f"error: {error.code}: {error.message}")
