"""Ask an omni model about pictures and sounds: print its answer while it is written, keep what it says in a file that grows meanwhile.

omnistage serve qwen2_5_omni --checkpoint DIR --address 127.0.0.1:50050
python examples/omni.py "What do you see?" --image cat.jpg --address 127.0.0.1:50050 --voice Ethan --out answer.flac
"""

import argparse

from omnistage.client import AudioChunk, Done, Omni, Options, SoundFile, TextDelta

parser = argparse.ArgumentParser()
parser.add_argument("prompt")
parser.add_argument("--image", action="append", default=[])
parser.add_argument("--audio", action="append", default=[])
parser.add_argument("--address")
parser.add_argument("--voice", default="")
parser.add_argument("--profile", default="balanced", help="latency, balanced, quality or offline")
parser.add_argument("--seconds", type=float, default=60.0, help="of speech; the answer is left when it has so much")
parser.add_argument("--out", default="answer.wav")
arguments = parser.parse_args()

options = Options(voice=arguments.voice, profile=arguments.profile)
with Omni(address=arguments.address) as omni, SoundFile(arguments.out) as file:
    for event in omni.stream(arguments.prompt, images=arguments.image, audios=arguments.audio, **options):
        match event:
            case TextDelta():
                print(event.text, end="", flush=True)
            case AudioChunk():
                file.write(event)
                if not event.first_sample:
                    wait = "" if event.prebuffer_s is None else f"; a player should wait {event.prebuffer_s:.2f} s before it plays"
                    print(f"\n[first sound after {event.arrival_s:.2f} s{wait}]")
                if event.first_sample + len(event.samples) >= arguments.seconds * event.sample_rate_hz:
                    print(f"\n{arguments.seconds:g} s of sound or a little more in {arguments.out}")
                    break
            case Done():
                print(f"\n{event.timing.audio_s:.2f} s of sound in {arguments.out}")
