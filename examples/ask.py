"""Ask one question, print the answer, keep the sound.

python examples/ask.py "What is a kite?"                          a private stack, started for this call
python examples/ask.py "What is a kite?" --address host:50050      a running router
"""

import argparse

from omnistage.client import Omni

parser = argparse.ArgumentParser()
parser.add_argument("prompt")
parser.add_argument("--address")
parser.add_argument("--out", default="answer.wav")
arguments = parser.parse_args()

with Omni(address=arguments.address) as omni:
    answer = omni.generate(arguments.prompt)

print(answer.text)
if answer.audio:
    answer.audio.save(arguments.out)
    print(f"{answer.audio.duration_s:.2f} s of sound in {arguments.out}, first heard after {answer.timing.ttfa_s} s")
