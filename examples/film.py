"""Make a film of a prompt: its file grows while frames come, and can be played meanwhile.

python examples/film.py "a hill in the rain" --out hill.webm --address host:50050
"""

import argparse
from pathlib import Path

from omnistage.client import Done, Omni, Progress, VideoDelta

parser = argparse.ArgumentParser()
parser.add_argument("prompt")
parser.add_argument("--out", type=Path, default=Path("film.webm"))
parser.add_argument("--frames", type=int)
parser.add_argument("--image", help="with which it begins")
parser.add_argument("--address")
arguments = parser.parse_args()

frames = 0
options = {"frames": arguments.frames, "timeout_s": 3600.0}
with Omni(address=arguments.address) as omni, arguments.out.open("wb") as file:
    for event in omni.stream_film(arguments.prompt, image=arguments.image or (), **options):
        match event:
            case Progress():
                print(f"step {event.done} of {event.total}")
            case VideoDelta():
                file.write(event.data)
                file.flush()
                frames += event.frames
            case Done():
                print(f"{frames} frames in {arguments.out}, seed {event.seed}")
