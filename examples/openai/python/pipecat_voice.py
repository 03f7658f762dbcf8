"""Pipecat's own services for OpenAI, with this base URL: a pipeline of LLM and speech answers one turn. Writes answer.wav.

pip install "pipecat-ai[openai]"; python pipecat_voice.py http://127.0.0.1:8000 smol "What is a kite?"
"""

import asyncio
import sys
import wave

from pipecat.frames.frames import EndFrame, Frame, LLMContextFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.tts import OpenAITTSService

RATE_HZ = 24_000


class SoundCollector(FrameProcessor):
    """Stands at the end of the pipeline, where the sound comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.sound = b""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.sound += frame.audio
        await self.push_frame(frame, direction)


async def answer(url: str, model: str, question: str) -> bytes:
    """The answer as samples of 16 bit."""
    llm = OpenAILLMService(api_key="any", base_url=f"{url}/v1", settings=OpenAILLMService.Settings(model=model))
    speech = OpenAITTSService(api_key="any", base_url=f"{url}/v1", sample_rate=RATE_HZ)
    listener = SoundCollector()
    task = PipelineTask(Pipeline([llm, speech, listener]), params=PipelineParams(audio_out_sample_rate=RATE_HZ))
    turns = LLMContext([{"role": "user", "content": question}])
    await task.queue_frames([LLMContextFrame(turns), EndFrame()])
    await PipelineRunner(handle_sigint=False).run(task)
    return listener.sound


with wave.open("answer.wav", "wb") as file:
    file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
    file.writeframes(asyncio.run(answer(*sys.argv[1:])))
