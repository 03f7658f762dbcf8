"""LiveKit Agents' own services for OpenAI, with this base URL: an answer as text, and the same spoken. Writes answer.wav.

pip install livekit-agents livekit-plugins-openai; python livekit_voice.py http://127.0.0.1:8000 smol "What is a kite?"
"""

import asyncio
import sys
from pathlib import Path

from livekit.agents.llm import ChatContext
from livekit.agents.utils import http_context
from livekit.plugins import openai


async def answer(url: str, model: str, question: str) -> bytes:
    """The answer as a WAV file."""
    async with http_context.open():
        llm = openai.LLM(model=model, base_url=f"{url}/v1", api_key="any")
        speech = openai.TTS(model="gpt-4o-mini-tts", voice="alloy", base_url=f"{url}/v1", api_key="any")
        turns = ChatContext.empty()
        turns.add_message(role="user", content=question)
        text = ""
        async with llm.chat(chat_ctx=turns) as chunks:
            async for chunk in chunks:
                text += (chunk.delta.content if chunk.delta else None) or ""
        print(text)
        async with speech.synthesize(text) as stream:
            frame = await stream.collect()
        await llm.aclose()
        await speech.aclose()
        return bytes(frame.to_wav_bytes())


Path("answer.wav").write_bytes(asyncio.run(answer(*sys.argv[1:])))
