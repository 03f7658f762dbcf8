"""Kill a Talker in mid speech and hear nothing of it: a private stack with two Talkers, one of which is killed while it speaks.

python examples/rescue.py "How do plants make food?" --timeline rescue.png
"""

import argparse
import os
import signal
from pathlib import Path

import numpy as np

from omnistage.cli.timeline import draw
from omnistage.client import AudioChunk, Done, Failover, Omni, TextDelta

parser = argparse.ArgumentParser()
parser.add_argument("prompt")
parser.add_argument("--pipeline", default="smol")
parser.add_argument("--stage", default="talker")
parser.add_argument("--chunks", type=int, default=3, help="of sound that come before the kill")
parser.add_argument("--seed", type=int, default=3)
parser.add_argument("--timeline", type=Path, help="a PNG to draw")
arguments = parser.parse_args()

with Omni(pipeline=arguments.pipeline, replicas={arguments.stage: 2}) as omni:
    undisturbed = omni.generate(arguments.prompt, seed=arguments.seed)
    text, sounds = "", []
    for event in omni.stream(arguments.prompt, seed=arguments.seed):
        match event:
            case TextDelta():
                text += event.text
            case AudioChunk():
                sounds.append(event.samples)
                if len(sounds) == arguments.chunks:
                    replicas = [replica for replica in omni.replicas() if replica.stage == arguments.stage]
                    busy = max(replicas, key=lambda replica: replica.sessions)
                    os.kill(busy.pid, signal.SIGKILL)
                    print(f"killed the {busy.stage} at {busy.address}")
            case Failover():
                print(f"{event.stage} at {event.lost} lost ({event.reason}); {event.replica} went on after {event.pause_s * 1000:.0f} ms")
            case Done() if arguments.timeline:
                draw(arguments.timeline, event, text)

assert undisturbed.audio
same = text == undisturbed.text and np.array_equal(np.concatenate(sounds), undisturbed.audio.samples)
print("the same words and the same samples as without the kill" if same else "NOT the same answer")
