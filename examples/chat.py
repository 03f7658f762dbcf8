"""A conversation: every line of standard input is a turn, and every answer becomes a turn too.

python examples/chat.py --address host:50050
"""

import argparse
import sys
from collections.abc import Mapping

from omnistage.client import Omni, OverloadedError

parser = argparse.ArgumentParser()
parser.add_argument("--address")
arguments = parser.parse_args()

conversation: list[Mapping[str, str]] = [{"role": "system", "content": "You are brief and friendly."}]
with Omni(address=arguments.address) as omni:
    for line in map(str.strip, sys.stdin):
        if not line:
            continue
        conversation.append({"role": "user", "content": line})
        try:
            answer = omni.chat(conversation)
        except OverloadedError as error:
            print(f"busy; ask again in {error.retry_delay_s} s")
            conversation.pop()
            continue
        print(answer["content"])
        conversation.append(answer)
