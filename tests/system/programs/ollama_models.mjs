// Ollama's own client for JavaScript: node ollama_models.mjs URL
import assert from 'node:assert/strict';
import { Ollama } from 'ollama';

const client = new Ollama({ host: process.argv[2] });
const asked = { model: 'smol', messages: [{ role: 'user', content: 'What is a kite?' }], options: { num_predict: 12, temperature: 0.8, seed: 7 } };

assert.deepEqual((await client.list()).models.map(({ name }) => name), ['smol:latest']);
assert.deepEqual((await client.ps()).models.map(({ name }) => name), ['smol:latest']);
assert.deepEqual((await client.show({ model: 'smol' })).capabilities, ['completion']);
assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
const whole = await client.chat(asked);
assert.ok(whole.message.content && whole.done_reason === 'length' && whole.eval_count === 12, JSON.stringify(whole));
const parts = [];
for await (const part of await client.chat({ ...asked, stream: true })) parts.push(part.message.content);
assert.equal(parts.join(''), whole.message.content);
const { response } = await client.generate({ model: 'smol', prompt: 'Is a giraffe tall? Answer in JSON.', format: { type: 'object', properties: { is_tall: { type: 'boolean' } }, required: ['is_tall'] } });
assert.equal(typeof JSON.parse(response).is_tall, 'boolean');
await assert.rejects(client.chat({ ...asked, model: 'none' }), /'none' does not exist here; there are: smol/);
await assert.rejects(client.chat({ ...asked, tools: [{ type: 'function', function: { name: 'f' } }] }), /tools: nothing here does that yet/);
await assert.rejects(client.pull({ model: 'smol' }), /omnistage pull/);
