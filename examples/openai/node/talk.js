// Asks a gateway as OpenAI is asked: prints the answer while it is spoken, has the question spoken, and, where a model draws, drawn.
//
//     npm install
//     node talk.js http://127.0.0.1:8000/v1 "A red circle on blue." [MODEL]
import { writeFileSync } from 'node:fs';
import OpenAI from 'openai';

const [baseURL, question, named] = process.argv.slice(2);
if (!question) throw new Error('usage: node talk.js URL QUESTION [MODEL]');
const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? 'nobody' });
try {
  const { data: models } = await client.models.list();
  const model = named ?? models.find(({ outputs }) => outputs.includes('audio')).id;
  const answer = await client.chat.completions.create({
    model,
    messages: [{ role: 'user', content: question }],
    modalities: ['text', 'audio'],
    audio: { voice: 'alloy', format: 'pcm16' },
    stream: true,
  });
  const sound = [];
  for await (const { choices } of answer) {
    const audio = choices[0]?.delta.audio;
    if (audio?.transcript) process.stdout.write(audio.transcript);
    if (audio?.data) sound.push(Buffer.from(audio.data, 'base64'));
  }
  console.log();
  writeFileSync('answer.pcm', Buffer.concat(sound)); // 16 bit, 24,000 samples a second: ffplay -f s16le -ar 24000 answer.pcm

  const speech = await client.audio.speech.create({ model: 'tts-1', voice: 'alloy', input: question, response_format: 'wav' });
  writeFileSync('speech.wav', Buffer.from(await speech.arrayBuffer()));

  if (models.some(({ outputs }) => outputs.includes('image'))) {
    const { data: pictures } = await client.images.generate({ model: 'gpt-image-1', prompt: question });
    writeFileSync('picture.png', Buffer.from(pictures[0].b64_json, 'base64'));
  }
} catch (error) {
  if (!(error instanceof OpenAI.APIError)) throw error;
  console.error(`error: ${error.code}: ${error.message}`);
  process.exitCode = 1;
}
