// Vercel's AI SDK, by its providers for OpenAI and for what is compatible: node ai_sdk.mjs URL
import assert from 'node:assert/strict';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateImage, generateSpeech, generateText, Output, streamText } from 'ai';
import { z } from 'zod';

const baseURL = `${process.argv[2]}/v1`;
const compatible = createOpenAICompatible({ name: 'omnistage', baseURL, apiKey: 'any', supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL, apiKey: 'any' });
const asked = { prompt: 'What is a kite?', temperature: 0, maxOutputTokens: 16, maxRetries: 0 };

for (const model of [compatible('smol'), openai('smol'), openai.chat('smol')]) {
  const whole = await generateText({ model, ...asked });
  assert.ok(whole.text && whole.finishReason === 'length', JSON.stringify(whole.steps));
  assert.ok(whole.usage.inputTokens > 0 && whole.usage.outputTokens === 16, JSON.stringify(whole.usage));
  const parts = [];
  for await (const part of streamText({ model, ...asked }).textStream) parts.push(part);
  assert.ok(parts.length > 2);
  assert.equal(parts.join(''), whole.text);
  const output = Output.object({ schema: z.object({ is_tall: z.boolean() }) });
  const told = await generateText({ model, output, prompt: 'Is a giraffe tall?', maxRetries: 0 });
  assert.equal(typeof told.output.is_tall, 'boolean');
  await assert.rejects(generateText({ model, ...asked, temperature: 9 }), /must be at most 2/);
}
const { images } = await generateImage({ model: compatible.imageModel('picture'), prompt: 'a red circle', maxRetries: 0 });
assert.equal(images[0].mediaType, 'image/png');
const { audio } = await generateSpeech({ model: openai.speech('tts-1'), text: 'Good morning.', voice: 'alloy', maxRetries: 0 });
assert.ok(audio.uint8Array.length > 1000);
