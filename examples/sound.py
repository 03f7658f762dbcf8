"""Make the sound that a prompt describes, written while it comes.

python examples/sound.py "rain on a tin roof" --seconds 10 --out rain.wav --address host:50050
"""

import argparse

from omnistage.client import AudioChunk, Done, Omni, SoundFile

parser = argparse.ArgumentParser()
parser.add_argument("prompt")
parser.add_argument("--seconds", type=float, default=5.0)
parser.add_argument("--out", default="sound.wav")
parser.add_argument("--address")
arguments = parser.parse_args()

with Omni(address=arguments.address) as omni, SoundFile(arguments.out) as file:
    for event in omni.stream_sound(arguments.prompt, seconds=arguments.seconds, timeout_s=600.0):
        match event:
            case AudioChunk():
                file.write(event)
            case Done():
                print(f"{event.timing.audio_s:.2f} s of sound in {arguments.out}, seed {event.seed}")
