// Asks a router, prints the text as it comes, writes the speech to answer.wav and a picture to picture.png. Ctrl-C cancels.
//
//     omnistage protos protos --errors && npm install
//     node ask.js HOST:PORT QUESTION [SEED [MODEL [OUTPUT,...]]]
//     node ask.js HOST:PORT "A red circle on blue." 7 "" image
import { writeFileSync } from 'node:fs';
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const files = ['omnistage/v1/omni.proto', 'google/rpc/status.proto', 'google/rpc/error_details.proto'];
const options = { includeDirs: [process.env.PROTOS ?? 'protos'], defaults: true, enums: String, longs: String };
const types = loader.loadSync(files, options);
const { OmniService } = grpc.loadPackageDefinition(types).omnistage.v1;

// The reason of a failure, and when to ask again, are in a google.rpc.Status in the trailing metadata.
function explain(error) {
  let [reason, more] = [grpc.status[error.code], ''];
  const [packed] = error.metadata.get('grpc-status-details-bin');
  for (const any of packed ? types['google.rpc.Status'].deserialize(packed).details : []) {
    const detail = types[any.type_url.split('/').pop()]?.deserialize(any.value);
    if (detail?.reason) reason = detail.reason; // ErrorInfo
    for (const { field } of detail?.fieldViolations ?? []) more += `; field ${field}`; // BadRequest
    if (detail?.retryDelay) more += `; ask again in ${+detail.retryDelay.seconds + detail.retryDelay.nanos / 1e9} s`; // RetryInfo
  }
  return `error: ${reason}: ${error.details}${more}`;
}

// The 44 bytes before signed 16-bit samples, in which sound comes unless another encoding is asked for.
function wavHead(bytes, { sampleRateHz: rate, channelCount: channels }) {
  const head = Buffer.from('RIFF....WAVEfmt ....................data....');
  [[4, 36 + bytes], [16, 16], [24, rate], [28, 2 * channels * rate], [40, bytes]].forEach(([at, value]) => head.writeUInt32LE(value, at));
  [[20, 1], [22, channels], [32, 2 * channels], [34, 16]].forEach(([at, value]) => head.writeUInt16LE(value, at));
  return head;
}

const [address, question, seed, model, outputs] = process.argv.slice(2);
if (!question) throw new Error('usage: node ask.js HOST:PORT QUESTION [SEED [MODEL [OUTPUT,...]]]');
const client = new OmniService(address, grpc.credentials.createInsecure());
const thinker = { messages: [{ role: 'user', parts: [{ text: question }] }] };
// A client that wants a picture says so; the router finds the pipeline that draws it.
const call = client.Generate({ model, seed, thinker, outputs: outputs?.split(',') }, { deadline: Date.now() + 120_000 });
process.on('SIGINT', () => call.cancel());
const [sound, picture] = [[], []];
try {
  for await (const { chunk } of call) {
    if (chunk?.text) process.stdout.write(chunk.text.text);
    if (chunk?.audio) sound.push(chunk.audio);
    if (chunk?.image) picture.push(chunk.image.data.data);
  }
  console.log();
  const samples = Buffer.concat(sound.map((piece) => piece.data));
  if (sound.length) writeFileSync('answer.wav', Buffer.concat([wavHead(samples.length, sound[0]), samples]));
  if (picture.length) writeFileSync('picture.png', Buffer.concat(picture));
} catch (error) {
  console.error(`\n${explain(error)}`);
  process.exitCode = 1;
}
client.close();
